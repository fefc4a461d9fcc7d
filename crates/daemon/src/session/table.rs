//! The table of Sessions that have not ended: making, finding and counting them, and what a Sandbox still owes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pepo_api::{AppId, Ended, ImageId, Reason, SandboxId, SessionId, WorkspaceChoice};
use pepo_sandbox::{Exit, Host, Vmm, Warm};
use tokio::sync::{mpsc, watch};

use super::handle::{ASKS, Ask, Shared};
use super::state::{Cause, State};
use super::{
    Commands, Error, Files, FindImage, Published, Services, Session, Shelf, Spec, activity, driver, engine_id,
    sandbox_id,
};
use crate::capacity::{Capacity, Place};
use crate::config::{PoolConfig, Retention, SandboxConfig};
use crate::egress::{Egress, Whose};
use crate::network::{Counts, Reach};
use crate::pool::{Claimed, Pool, Shape};
use crate::secrets::{Secrets, Vault};
use crate::store::{self, Counted, SessionRow, Store, Write};
use crate::workspace::{Lent, Use, Workspaces};

/// What a new Session needs to be made.
#[derive(Debug)]
pub struct NewSession {
    /// Its id.
    pub id: SessionId,
    /// Whose it will be.
    pub app: AppId,
    /// What it shall be; the Image's id is filled in.
    pub spec: Spec,
    /// Its latest end.
    pub expires_at: Option<jiff::Timestamp>,
    /// Which Workspace it gets.
    pub workspace: Option<WorkspaceChoice>,
    /// What only the guest may know; the names are in `spec`.
    pub secrets: Secrets,
}

/// All Sessions that have not ended.
#[derive(Clone)]
pub struct Sessions(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) live: Mutex<HashMap<SessionId, Session>>,
    /// Keys that somebody is making a Session for.
    pub(super) opening: watch::Sender<HashSet<(AppId, String)>>,
    pub(super) count: watch::Sender<usize>,
    pub(super) draining: watch::Sender<bool>,
    /// Why nothing new begins, while that is so.
    pub(super) refused: watch::Sender<Option<String>>,
    pub(super) store: Store,
    pub(super) host: Host,
    pub(super) capacity: Capacity,
    pub(super) pool: Pool,
    pub(super) find_image: FindImage,
    pub(super) config: SandboxConfig,
    pub(super) vmm: Vmm,
    pub(super) reach: Reach,
    pub(super) egress: Option<Egress>,
    pub(super) vault: Vault,
    pub(super) shelf: Shelf,
    pub(super) owed: Mutex<BTreeMap<SandboxId, String>>,
    pub(super) workspaces: Workspaces,
}

impl std::fmt::Debug for Sessions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sessions")
    }
}

impl Sessions {
    /// An empty table.
    pub fn new(
        workspaces: Workspaces,
        vault: Vault,
        find_image: FindImage,
        config: SandboxConfig,
        pool: PoolConfig,
        vmm: Vmm,
        reach: Reach,
    ) -> Self {
        let (store, host) = (workspaces.store().clone(), workspaces.host().clone());
        let egress = reach.network().map(|network| Egress::new(host.clone(), store.clone(), &network.settings));
        Sessions(Arc::new(Inner {
            egress,
            live: Mutex::default(),
            opening: watch::Sender::default(),
            count: watch::Sender::new(0),
            draining: watch::Sender::new(false),
            refused: watch::Sender::new(None),
            capacity: Capacity::new(config.budget, config.boots),
            pool: Pool::new(pool, vmm),
            store,
            host,
            find_image,
            config,
            vmm,
            reach,
            vault,
            shelf: Shelf::default(),
            owed: Mutex::default(),
            workspaces,
        }))
    }

    pub(super) fn live(&self) -> MutexGuard<'_, HashMap<SessionId, Session>> {
        self.0.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A digest of a body that may hold secrets, as text.
    pub fn fingerprint(&self, bytes: &[u8]) -> String {
        store::hex(&self.0.vault.fingerprint(bytes))
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.0.store
    }

    /// The privileged side.
    pub fn host(&self) -> &Host {
        &self.0.host
    }

    /// What Sessions may reach.
    pub fn reach(&self) -> &Reach {
        &self.0.reach
    }

    /// Puts what the Sessions of an App may reach in force once more: what it allows has changed. Returns when that is so.
    pub async fn narrow(&self, app: AppId) {
        let of_app: Vec<Session> = self.live().values().filter(|session| session.app() == app).cloned().collect();
        let reaching = of_app.iter().map(Session::reach_again);
        for (session, done) in of_app.iter().zip(futures_util::future::join_all(reaching).await) {
            // One that has ended reaches nothing.
            if let Err(error @ Error::Host(_)) = done {
                tracing::error!(session = %session.id(), %error, "its network could not follow its App's");
            }
        }
    }

    /// What a Sandbox is made with.
    pub(crate) fn interface(&self) -> pepo_sandbox::plan::Network {
        match self.0.reach.network() {
            Some(_) => pepo_sandbox::plan::Network::Slot,
            None => pepo_sandbox::plan::Network::Absent,
        }
    }

    /// Answers for the names and ways out of a Session's Sandbox, whose policy is in force already.
    ///
    /// # Errors
    /// Its sockets or its relay cannot be had.
    pub(super) async fn answer(
        &self,
        session: &Session,
        id: pepo_sandbox::SandboxId,
        policy: pepo_sandbox::net::Policy,
    ) -> Result<(), pepo_sandbox::host::Error> {
        let Some(egress) = &self.0.egress else { return Ok(()) };
        let whose = Whose { app: session.app(), session: session.id(), sandbox: sandbox_id(id) };
        egress.answer(whose, id, policy).await
    }

    /// Puts in force what a Session may reach by what was said of it, within what its App allows now. What cannot be is
    /// closed: nothing is open that nobody asked for.
    ///
    /// # Errors
    /// The privileged side cannot do it.
    pub(super) async fn enforce(
        &self,
        session: &Session,
        active: &pepo_sandbox::Active,
        said: &pepo_api::NetworkSpec,
    ) -> Result<(), pepo_sandbox::host::Error> {
        if active.plan().network == pepo_sandbox::plan::Network::Absent || self.0.reach.network().is_none() {
            return Ok(());
        }
        let policy = self.0.reach.in_force(session.app(), said).unwrap_or_else(|wrong| {
            let (param, reason) = (wrong.param, wrong.message);
            tracing::warn!(sandbox = %active.id(), param, reason, "its network is closed: its policy cannot be");
            Default::default()
        });
        active.network(&policy).await?;
        self.answer(session, active.id(), policy).await
    }

    /// As [`Sessions::enforce`], where nobody can be told.
    pub(super) async fn reapply(&self, session: &Session, active: &pepo_sandbox::Active, said: &pepo_api::NetworkSpec) {
        if let Err(error) = self.enforce(session, active, said).await {
            tracing::error!(sandbox = %active.id(), %error, "its network policy could not be put in force");
        }
    }

    /// What Sandboxes get.
    pub fn config(&self) -> &SandboxConfig {
        &self.0.config
    }

    /// What runs them.
    pub fn vmm(&self) -> Vmm {
        self.0.vmm
    }

    /// The Workspaces that they use.
    pub fn workspaces(&self) -> &Workspaces {
        &self.0.workspaces
    }

    /// Output of commands whose Sandbox has gone.
    pub fn shelf(&self) -> &Shelf {
        &self.0.shelf
    }

    /// Makes one. Returns when it is recorded; its Sandbox is made meanwhile.
    ///
    /// # Errors
    /// [`Error::Draining`], [`Error::NoImage`], [`Error::Full`], a name that is taken.
    pub async fn create(&self, new: NewSession) -> Result<Session, Error> {
        let sessions = self.clone();
        // A caller that leaves must not leave a record, or a claimed Sandbox, that nobody drives.
        let making = tokio::spawn(async move { sessions.make(new).await });
        making.await.unwrap_or_else(|error| match error.is_cancelled() {
            // pepod ends.
            true => Err(Error::Store(store::Error::Closed)),
            false => {
                tracing::error!(%error, "making a Session ended in a panic");
                Err(Error::NoSandbox("an internal error; see the log".into()))
            }
        })
    }

    async fn make(&self, new: NewSession) -> Result<Session, Error> {
        let NewSession { id, app, mut spec, expires_at, workspace, secrets } = new;
        // Whoever has too much already does not wait for more; what is written decides all the same.
        self.0.store.check_quota(app, spec.memory_mib, spec.cpus).await?;
        let mut room = self.room(app, spec.image.clone(), &spec).await?;
        spec.image_id = room.files.id;
        spec.workspace = match &workspace {
            Some(choice) => Some(self.0.workspaces.choose(app, id, choice).await?),
            None => None,
        };
        let used = spec.workspace.clone();
        let lent = spec.volumes.clone();
        let published = Published {
            generation: 1,
            state: State::Requested,
            spec: Arc::new(spec),
            activation: 0,
            active_at: None,
            expires_at,
            keep_until: None,
            guest: None,
            last_end: None,
            ended: None,
        };
        let (session, asks) = self.handle(id, app, store::now(), published);
        if let Err(error) = self.seal(id, &secrets).await {
            self.unchoose(app, used, &lent).await;
            return Err(error);
        }
        let row = Box::new(session.row());
        let forget = || self.0.store.write_soon(Write::ForgetSecrets(session.id()));
        match room.claim(session.id(), 1) {
            None => {
                if let Err(error) = self.0.store.write(Write::NewSession(row)).await {
                    forget();
                    self.unchoose(app, used, &lent).await;
                    return Err(error.into());
                }
            }
            // One commit for both: a Session that begins warm waits for the disk once.
            Some(claim) => match self.0.store.write(Write::NewSessionOn(row, claim)).await {
                Ok(()) => room.committed = true,
                Err(error) => {
                    forget();
                    if matches!(error, store::Error::NotClaimed(_)) || !error.is_an_answer() {
                        // Whose it is now is not known.
                        room.discard().await;
                    }
                    self.unchoose(app, used, &lent).await;
                    return Err(error.into());
                }
            },
        }
        self.0.store.record(session.event("session.created"));
        self.enter(&session);
        driver::spawn(self.clone(), session.clone(), asks, driver::Start::New(room));
        Ok(session)
    }

    /// No Session came of it: what was recorded as its own goes.
    async fn unchoose(&self, app: AppId, used: Option<Use>, lent: &[Lent]) {
        self.0.workspaces.give_back(lent).await;
        if let Some(used) = used {
            self.0.workspaces.session_ended(app, &Use { keep: false, ..used }).await;
        }
    }

    /// What a new Sandbox begins with: its Image's files, and room for it; where one like it waits in the pool, that one.
    ///
    /// # Errors
    /// [`Error::Draining`], [`Error::NoImage`], [`Error::Full`].
    pub(super) async fn room(&self, app: AppId, image: String, spec: &Spec) -> Result<Room, Error> {
        if *self.0.draining.borrow() {
            return Err(Error::Draining);
        }
        if let Some(why) = self.0.refused.borrow().clone() {
            return Err(Error::Short(why));
        }
        let files = (self.0.find_image)(image).await?;
        let shape = Shape::of(spec, files.id, self.0.vmm);
        let committed = false;
        if let Some(mut claimed) = self.0.pool.claim(self, &shape)
            && claimed.admit()
        {
            return Ok(Room { files, shape, supply: Supply::Warm(Box::new(claimed)), committed });
        }
        let place = self.0.capacity.admit(app, spec.needs()).await?;
        if *self.0.draining.borrow() {
            return Err(Error::Draining);
        }
        // It had to wait, and one may have become ready meanwhile: its own place is one too many.
        let supply = match self.0.pool.claim(self, &shape) {
            Some(claimed) => Supply::Warm(Box::new(claimed.with(place))),
            None => Supply::Cold(place),
        };
        Ok(Room { files, shape, supply, committed })
    }

    /// The files of an Image.
    ///
    /// # Errors
    /// [`Error::NoImage`].
    pub async fn find_files(&self, image: String) -> Result<Files, Error> {
        (self.0.find_image)(image).await
    }

    /// The count of what Sandboxes use.
    pub fn capacity(&self) -> &Capacity {
        &self.0.capacity
    }

    /// From now on nothing new begins, for this reason; or it may again.
    pub fn refuse(&self, why: Option<String>) {
        self.0.refused.send_replace(why);
    }

    /// Sandboxes that serve a Session now.
    pub fn serving(&self) -> Vec<pepo_sandbox::SandboxId> {
        let live = self.live();
        let serving = live.values().filter_map(|session| {
            let now = session.0.published.borrow();
            now.guest.as_ref().and(now.state.tenure()).and_then(|tenure| engine_id(tenure.sandbox))
        });
        serving.collect()
    }

    /// Of the Sessions whose Sandbox nobody uses now, the one that was used least recently.
    pub fn longest_unused(&self) -> Option<Session> {
        let live = self.live();
        let unused = live.values().filter(|session| session.0.published.borrow().guest.is_some());
        let since = |session: &&Session| session.0.activity.borrow().unused_since(jiff::Timestamp::now());
        unused
            .filter_map(|session| Some((since(&session)?, session)))
            .min_by_key(|(since, _)| *since)
            .map(|(_, one)| one.clone())
    }

    /// Those that wait ready.
    pub fn pool(&self) -> &Pool {
        &self.0.pool
    }

    /// How many commands run now, without Services.
    pub fn commands_running(&self) -> usize {
        self.live().values().map(|session| session.commands().running() as usize).sum()
    }

    /// How many want processors now: commands, and Sessions on their way to Active.
    pub fn at_work(&self) -> usize {
        let live = self.live();
        let coming = |session: &&Session| session.0.published.borrow().state.is_coming();
        live.values().map(|session| session.commands().running() as usize).sum::<usize>()
            + live.values().filter(coming).count()
    }

    pub(super) fn handle(
        &self,
        id: SessionId,
        app: AppId,
        created_at: jiff::Timestamp,
        published: Published,
    ) -> (Session, mpsc::Receiver<Ask>) {
        let (asks, asked) = mpsc::channel(ASKS);
        let shared = Shared {
            id,
            app,
            created_at,
            published: watch::Sender::new(published),
            activity: watch::Sender::new(activity::Activity::new(jiff::Timestamp::now())),
            terminate: watch::Sender::new(None),
            asks,
            commands: Commands::new(self.0.store.clone(), self.0.shelf.clone()),
            services: Services::default(),
            returning: watch::Sender::new(false),
        };
        (Session(Arc::new(shared)), asked)
    }

    pub(super) fn enter(&self, session: &Session) {
        let mut live = self.live();
        live.insert(session.id(), session.clone());
        self.0.count.send_replace(live.len());
    }

    pub(super) fn leave(&self, id: SessionId) {
        let mut live = self.live();
        live.remove(&id);
        self.0.count.send_replace(live.len());
    }

    /// The live Session of that App with that id or name.
    pub fn find_live(&self, app: AppId, which: &str) -> Option<Session> {
        let live = self.live();
        let found = match which.parse::<SessionId>() {
            Ok(id) => live.get(&id),
            Err(_) => live.values().find(|session| session.0.published.borrow().spec.name.as_deref() == Some(which)),
        };
        found.filter(|session| session.app() == app).cloned()
    }

    /// The live Session of that id.
    pub fn by_id(&self, id: SessionId) -> Option<Session> {
        self.live().get(&id).cloned()
    }

    /// The Session of that App with that id or name, live or ended.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn find(&self, app: AppId, which: &str) -> Result<Found, Error> {
        if let Some(session) = self.find_live(app, which) {
            session.is_back().await;
            return Ok(Found::Live(session));
        }
        let row = match which.parse::<SessionId>() {
            Ok(id) => self.0.store.session(app, id).await?,
            Err(_) => self.0.store.session_named(app, which.to_owned()).await?,
        };
        // It may have ended between the two looks; a row that has not is a live one again.
        match row {
            Some(row) if row.ended.is_some() => Ok(Found::Ended(Box::new(row))),
            Some(row) => match self.find_live(app, which) {
                Some(session) => Ok(Found::Live(session)),
                None => Ok(Found::Ended(Box::new(row))),
            },
            None => Err(Error::NotFound { what: "Session", which: which.chars().take(80).collect() }),
        }
    }

    /// Every live one.
    pub fn all(&self) -> Vec<Session> {
        self.live().values().cloned().collect()
    }

    /// How many are live, as it changes.
    pub fn count(&self) -> watch::Receiver<usize> {
        self.0.count.subscribe()
    }

    /// Every Sandbox that a live Session or the pool accounts for.
    pub fn sandboxes(&self) -> Vec<pepo_sandbox::SandboxId> {
        // The pool first: one that is claimed meanwhile is in both, not in neither.
        let spare = self.0.pool.sandboxes();
        let live = self.live();
        let tenures = live.values().filter_map(|session| session.0.published.borrow().state.tenure());
        spare.into_iter().chain(tenures.filter_map(|tenure| engine_id(tenure.sandbox))).collect()
    }

    /// Live Sessions by Image.
    pub fn images_in_use(&self) -> HashMap<ImageId, u32> {
        let mut uses = HashMap::new();
        for session in self.live().values() {
            *uses.entry(session.0.published.borrow().spec.image_id).or_insert(0) += 1;
        }
        uses
    }

    /// Sandboxes that have not given everything back, and what of.
    pub fn owed(&self) -> BTreeMap<SandboxId, String> {
        self.0.owed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes nothing new from here on.
    pub fn drain(&self) {
        self.0.draining.send_replace(true);
    }

    /// Takes new ones again.
    pub fn take_again(&self) {
        self.0.draining.send_replace(false);
    }

    /// Whether it takes nothing new.
    pub fn is_draining(&self) -> bool {
        *self.0.draining.borrow()
    }

    /// Ends all Sandboxes, and every Session that does not come back, at most `within`.
    pub async fn end_all(&self, reason: Reason, within: Duration) {
        self.drain();
        let ending = self.all().into_iter().map(|session| async move { session.put_away(Cause::plain(reason)).await });
        let ending = futures_util::future::join_all(ending);
        self.0.pool.shut();
        let _ = tokio::time::timeout(within, async { tokio::join!(ending, self.0.pool.emptied(within)) }).await;
    }

    /// Gives back everything of a Sandbox whose making failed or whose record is all there is. What is owed is remembered
    /// and tried again.
    pub(crate) async fn bury(&self, id: pepo_sandbox::SandboxId) {
        match self.0.host.release(id).await {
            Ok(()) => self.settled(id).await,
            Err(error) => self.owe(id, error.to_string()),
        }
    }

    /// Takes note of what a stop path left.
    pub(super) async fn settle(&self, exit: &Exit) {
        if let Some(usage) = &exit.usage {
            let last = crate::usage::sample(exit.id, usage, exit.traffic.as_ref());
            self.0.store.write_later(Write::Usage(last, store::Purpose::End)).await;
        }
        self.count_network(exit.id, exit.traffic.as_ref());
        match &exit.released {
            Ok(()) => self.settled(exit.id).await,
            Err(error) => self.owe(exit.id, error.to_string()),
        }
    }

    pub(crate) async fn settled(&self, id: pepo_sandbox::SandboxId) {
        self.unanswer(id);
        let api = sandbox_id(id);
        self.0.owed.lock().unwrap_or_else(PoisonError::into_inner).remove(&api);
        self.0.workspaces.detach(api);
        self.0.store.write_later(Write::DropSandbox(api)).await;
    }

    /// Gives the store what a Sandbox's network carried and refused: packets by the kernel, where they could be counted, and
    /// what is new of its names.
    pub(crate) fn count_network(&self, id: pepo_sandbox::SandboxId, traffic: Option<&pepo_sandbox::net::Traffic>) {
        let packets = traffic.map(|traffic| Counted::SinceItsMaking(Counts::of_packets(traffic)));
        let names = self.0.egress.as_ref().and_then(|egress| egress.more(id)).map(Counted::More);
        for counted in packets.into_iter().chain(names) {
            self.0.store.write_soon(Write::Counted(sandbox_id(id), counted));
        }
    }

    /// What a Session's present Sandbox carried and refused; of names, since this life answers it.
    pub fn counted_network(&self, session: &Session, traffic: &pepo_sandbox::net::Traffic) -> Counts {
        let mut counts = Counts::of_packets(traffic);
        let tenure = session.now().state.tenure();
        let id = tenure.and_then(|tenure| engine_id(tenure.sandbox));
        if let Some(tally) = id.and_then(|id| self.0.egress.as_ref()?.tally(id)) {
            counts.add(&Counts::of_names(&tally));
        }
        counts
    }

    /// What all Sandboxes of a Session carried and refused, the present one up to now.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn total_network(
        &self,
        session: &Session,
        traffic: &pepo_sandbox::net::Traffic,
    ) -> Result<Option<Counts>, Error> {
        let tenure = session.now().state.tenure();
        let present = tenure.map(|tenure| (tenure.sandbox, Counts::of_packets(traffic)));
        let id = tenure.and_then(|tenure| engine_id(tenure.sandbox));
        let names = id.and_then(|id| self.0.egress.as_ref()?.untold(id));
        let mut total = self.0.store.carried(session.id(), present).await?.unwrap_or_default();
        total.add(&names.unwrap_or_default());
        Ok(Some(total))
    }

    /// Answers a Sandbox that has ended no more.
    fn unanswer(&self, id: pepo_sandbox::SandboxId) {
        if let Some(egress) = &self.0.egress {
            self.count_network(id, None);
            egress.end(id);
        }
    }

    pub(crate) fn owe(&self, id: pepo_sandbox::SandboxId, what: String) {
        self.unanswer(id);
        tracing::error!(sandbox = %id, owed = what, "not everything was given back; trying again");
        let first = self.0.owed.lock().unwrap_or_else(PoisonError::into_inner).insert(sandbox_id(id), what).is_none();
        if first {
            let sessions = self.clone();
            tokio::spawn(async move {
                let mut pause = Duration::from_secs(1);
                loop {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(60));
                    match sessions.0.host.release(id).await {
                        Ok(()) => return sessions.settled(id).await,
                        Err(pepo_sandbox::host::Error::Lost) => return,
                        Err(error) => {
                            sessions
                                .0
                                .owed
                                .lock()
                                .unwrap_or_else(PoisonError::into_inner)
                                .insert(sandbox_id(id), error.to_string());
                        }
                    }
                }
            });
        }
    }

    /// Forgets what is older than the retention, now and every hour.
    pub async fn forget(&self, retention: Retention) {
        loop {
            let ago = |time: Duration| store::millis(jiff::Timestamp::now()) - time.as_millis() as i64;
            let Retention { records, audit, most_events, most_calls } = retention;
            let prune = Write::Prune {
                ended_before: ago(records),
                feed: store::Keep { before: ago(records), most: most_events },
                audit: store::Keep { before: ago(audit), most: most_calls },
            };
            self.0.store.write_later(prune).await;
            self.0.shelf.tidy();
            for _ in 0..60 {
                tokio::time::sleep(Duration::from_secs(60)).await;
                self.0.shelf.tidy();
            }
        }
    }
}

/// What an activation begins with.
#[derive(Debug)]
pub(super) struct Room {
    /// Its Image's.
    pub files: Files,
    /// What is made, where nothing is there yet.
    pub shape: Shape,
    supply: Supply,
    /// Whether the store knows whose the waiting Sandbox is.
    pub committed: bool,
}

#[derive(Debug)]
enum Supply {
    Cold(Place),
    Warm(Box<Claimed>),
}

impl Room {
    /// The Sandbox that waits ready, if one does.
    pub fn sandbox(&self) -> Option<pepo_sandbox::SandboxId> {
        match &self.supply {
            Supply::Cold(_) => None,
            Supply::Warm(claimed) => claimed.id(),
        }
    }

    fn claim(&self, session: SessionId, activation: u64) -> Option<store::Claim> {
        Some(store::Claim { sandbox: sandbox_id(self.sandbox()?), session, activation })
    }

    /// Its place, and the Sandbox that waits ready.
    pub fn part(self) -> Option<(Place, Option<Warm>)> {
        match self.supply {
            Supply::Cold(place) => Some((place, None)),
            Supply::Warm(claimed) => claimed.take().map(|(warm, place)| (place, Some(warm))),
        }
    }

    /// Gives it back to the host: nobody may have it.
    async fn discard(self) {
        if let Some((place, Some(warm))) = self.part() {
            if let Err(error) = warm.release().await {
                tracing::error!(%error, "not everything was given back");
            }
            drop(place);
        }
    }
}

/// A Session that was looked for.
#[derive(Debug)]
pub enum Found {
    /// It lives.
    Live(Session),
    /// Only its record is left.
    Ended(Box<SessionRow>),
}

impl Found {
    /// The live one.
    ///
    /// # Errors
    /// [`Error::Terminated`].
    pub fn live(self) -> Result<Session, Error> {
        match self {
            Found::Live(session) => Ok(session),
            Found::Ended(row) => {
                Err(Error::Terminated(row.ended.unwrap_or_else(|| Ended::new(Reason::Unknown, row.created_at))))
            }
        }
    }
}

//! What Sessions may reach: what each was told, within what its App allows now, over this instance's floor.
//!
//! An App's policy is the ceiling of its Sessions and what those get that name nothing. What a Session asks for beyond it is
//! refused, with the entry; where an App allows less later than what a Session has, both are met, so that a Session keeps
//! what was said of it and reaches the part that is allowed. Computed anew at each activation, change and restart.

use std::sync::Arc;

use pepo_api::{AppId, NetworkMode, NetworkRule, NetworkSpec};
use pepo_sandbox::net::policy::Beyond;
use pepo_sandbox::net::{Floor, Policy};

use super::{Network, Wrong, policy, told};
use crate::apps::Apps;
use crate::store::AppRow;

/// The instance's word and those of the Apps.
pub struct Reach {
    network: Option<Network>,
    apps: Arc<Apps>,
}

/// What an App allows, over this floor.
struct Ceiling<'a> {
    floor: &'a Floor,
    app: Arc<AppRow>,
    policy: Policy,
}

impl Reach {
    /// Of these; no network where Sandboxes have none.
    pub fn new(network: Option<Network>, apps: Arc<Apps>) -> Self {
        Reach { network, apps }
    }

    /// What this instance says about the network; none where Sandboxes have none.
    pub fn network(&self) -> Option<&Network> {
        self.network.as_ref()
    }

    /// What a Session of that App has that names no policy.
    pub fn unnamed(&self, app: AppId) -> NetworkSpec {
        let of_app = self.apps.get(app).and_then(|app| app.settings.network.clone());
        match (&self.network, of_app) {
            (None, _) => NetworkSpec { mode: NetworkMode::None, ..NetworkSpec::default() },
            (Some(_), Some(said)) => said,
            (Some(network), None) => NetworkSpec { mode: network.default, ..NetworkSpec::default() },
        }
    }

    /// What an App allows, where that is anything but everything.
    fn ceiling(&self, app: AppId) -> Result<Option<Ceiling<'_>>, Wrong> {
        let (Some(network), Some(app)) = (&self.network, self.apps.get(app)) else { return Ok(None) };
        let Some(said) = &app.settings.network else { return Ok(None) };
        let ceiling = policy(Some(network), said).map_err(|wrong| {
            let message = format!("of the App `{}`: {}: {}", app.name, wrong.param, wrong.message);
            Wrong { param: "network".to_owned(), message, ..wrong }
        })?;
        Ok(Some(Ceiling { floor: &network.settings.floor, app, policy: ceiling }))
    }

    /// Takes what is said of a Session, if its App allows all of it.
    ///
    /// # Errors
    /// What is wrong with it, or which entry the App does not allow.
    pub fn allowed(&self, app: AppId, said: &NetworkSpec) -> Result<Policy, Wrong> {
        let wanted = policy(self.network.as_ref(), said)?;
        let Some(Ceiling { floor, app, policy }) = self.ceiling(app)? else { return Ok(wanted) };
        match wanted.beyond(&policy, floor) {
            None => Ok(wanted.under(&policy, floor)),
            Some(beyond) => Err(refusal(&app.name, said, beyond)),
        }
    }

    /// What a Session of that App reaches that was told this: as much of it as its App allows now.
    ///
    /// # Errors
    /// What it was told, or its App's policy, cannot be any more: a preset that is gone, a floor that is another.
    pub fn in_force(&self, app: AppId, said: &NetworkSpec) -> Result<Policy, Wrong> {
        let wanted = policy(self.network.as_ref(), said)?;
        let Some(Ceiling { floor, policy, .. }) = self.ceiling(app)? else { return Ok(wanted) };
        let both = wanted.under(&policy, floor);
        both.check(floor).map_err(|error| told(&error))?;
        Ok(both)
    }

    /// What of a Session's policy its App does not allow any more.
    pub fn notes(&self, app: AppId, said: &NetworkSpec) -> Vec<String> {
        let beyond = || {
            let wanted = policy(self.network.as_ref(), said).ok()?;
            let Ceiling { floor, app, policy } = self.ceiling(app).ok()??;
            let beyond = wanted.beyond(&policy, floor)?;
            Some(format!("narrowed by its App: {}", refusal(&app.name, said, beyond).message))
        };
        beyond().into_iter().collect()
    }
}

fn refusal(app: &str, said: &NetworkSpec, beyond: Beyond) -> Wrong {
    let entry = |place: u16| said.allow.as_deref().unwrap_or_default().get(usize::from(place));
    let (param, message) = match beyond {
        Beyond::Mode => {
            let mode = if said.mode == NetworkMode::Public { "`public`" } else { "any network" };
            ("network.mode".to_owned(), format!("the App `{app}` does not allow {mode}"))
        }
        Beyond::Entry(place) => {
            let what = entry(place).map(in_words).unwrap_or_default();
            let message =
                format!("entry {place} ({what}): the network policy of the App `{app}` does not allow all of it");
            (format!("network.allow[{place}]"), message)
        }
        Beyond::Egress { most } => {
            ("network.egress_bytes_per_second".to_owned(), format!("the App `{app}` allows at most {most}"))
        }
        Beyond::Ingress { most } => {
            ("network.ingress_bytes_per_second".to_owned(), format!("the App `{app}` allows at most {most}"))
        }
    };
    Wrong::new(param, message)
        .hint(format!("`pepo app show {app}` says what it allows; leave `network` out to get all of that"))
}

/// An entry as people write it.
fn in_words(entry: &NetworkRule) -> String {
    let target = entry.domain.as_ref().or(entry.cidr.as_ref()).or(entry.preset.as_ref());
    let ports: Vec<String> = entry.ports.iter().map(u16::to_string).collect();
    let target: String = target.map(String::as_str).unwrap_or_default().chars().flat_map(char::escape_debug).collect();
    match ports.is_empty() {
        true => target,
        false => format!("{target}:{}", ports.join("+")),
    }
}

#[cfg(test)]
mod tests {
    use pepo_api::AppSettings;
    use pepo_sandbox::net::{Mode, Settings};

    use super::*;
    use crate::apps::Wanted;
    use crate::preset::Presets;
    use crate::store::{Actor, Store};

    fn spec(json: &str) -> NetworkSpec {
        serde_json::from_str(json).expect("a policy")
    }

    async fn reach(network: Option<&str>) -> (Reach, AppId, tempfile::TempDir) {
        let directory = tempfile::tempdir().expect("directory");
        let apps = Apps::open(Store::open(&directory.path().join("s.db")).expect("store")).expect("apps");
        let settings = AppSettings { network: network.map(spec), ..AppSettings::default() };
        let wanted = Wanted { name: "shop".into(), settings, text: None };
        let app = apps.create(AppId::generate(), wanted, Actor::Uid(0)).await.expect("app").id;
        let forge = ["forge.example.org", "*.forge.example.org"].map(str::to_owned).to_vec();
        let presets = Presets::new(Default::default(), &[("forge".to_owned(), forge)].into()).expect("presets");
        let network = Network { settings: Settings::default(), default: NetworkMode::Public, presets };
        (Reach::new(Some(network), Arc::new(apps)), app, directory)
    }

    const LIST: &str = r#"{"mode": "allow", "allow": [{"preset": "forge"}, {"cidr": "1.2.0.0/16", "ports": [22, 443]}],
        "egress_bytes_per_second": 100000}"#;

    #[tokio::test]
    async fn a_session_gets_at_most_what_its_app_allows() {
        let (reach, app, _kept) = reach(Some(LIST)).await;
        assert_eq!(reach.unnamed(app), spec(LIST), "one that names nothing has what its App has");
        let refused = |json: &str| {
            let wrong = reach.allowed(app, &spec(json)).expect_err(json);
            (wrong.param, wrong.message)
        };
        assert_eq!(
            refused(r#"{"mode": "public"}"#),
            ("network.mode".to_owned(), "the App `shop` does not allow `public`".to_owned())
        );
        assert_eq!(
            refused(
                r#"{"mode": "allow", "allow": [{"domain": "forge.example.org"}, {"cidr": "1.2.3.0/24", "ports": [22, 25]}]}"#
            ),
            (
                "network.allow[1]".to_owned(),
                "entry 1 (1.2.3.0/24:22+25): the network policy of the App `shop` does not allow all of it".to_owned()
            )
        );
        assert_eq!(
            refused(r#"{"mode": "allow", "allow": [], "egress_bytes_per_second": 200000}"#).0,
            "network.egress_bytes_per_second"
        );
        let narrower = spec(
            r#"{"mode": "allow", "allow": [{"domain": "a.forge.example.org"}, {"cidr": "1.2.3.4", "ports": [22]}]}"#,
        );
        let policy = reach.allowed(app, &narrower).expect("within");
        assert_eq!((policy.rules.len(), policy.egress_bytes_per_second), (2, Some(100_000)));
        assert_eq!(reach.allowed(app, &spec(r#"{"mode": "none"}"#)).expect("nothing").mode, Mode::None);
        assert!(reach.notes(app, &narrower).is_empty());
    }

    #[tokio::test]
    async fn what_an_app_allows_no_longer_is_closed_to_sessions_that_have_it() {
        let (reach, app, _kept) = reach(None).await;
        let said = spec(r#"{"mode": "allow", "allow": [{"cidr": "1.2.0.0/16"}, {"domain": "example.com"}]}"#);
        assert_eq!(reach.in_force(app, &said).expect("all of it").rules.len(), 2);
        assert_eq!(reach.unnamed(app).mode, NetworkMode::Public);
        let row = reach.apps.get(app).expect("the App");
        let settings = AppSettings { network: Some(spec(LIST)), ..AppSettings::default() };
        let wanted = Wanted { name: "shop".into(), settings, text: None };
        reach.apps.change(&row, wanted, Actor::Uid(0)).await.expect("narrowed");
        let policy = reach.in_force(app, &said).expect("a part of it");
        assert_eq!(policy.rules.len(), 1);
        assert_eq!((policy.rules[0].entry, policy.rules[0].open_ports()), (0, &[22, 443][..]));
        assert_eq!(
            reach.notes(app, &said),
            [
                "narrowed by its App: entry 0 (1.2.0.0/16): the network policy of the App `shop` does not allow all of it"
            ]
        );
        // `public` under a list is the list.
        assert_eq!(reach.in_force(app, &spec(r#"{"mode": "public"}"#)).expect("the list").mode, Mode::Allow);
    }
}

//! A build as pepod sees it: asks `pepo-host` for a builder, passes on what it tells, verifies, names.
//!
//! One at a time; the next waits for its turn and then often finds what it wanted. The builder's words are a stranger's:
//! bounded, and escaped by whoever shows them. When the caller goes away the builder is killed, and what it wrote goes
//! with its directory.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use pepo_api::{BuildEvent, BuildImage};
use pepo_sandbox::builder::{BuildPlan, Room};
use pepo_sandbox::{Host, StatePath, host};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::sync::mpsc;

use super::build::{Failure, Input, LINE, STEPS, Told};
use super::recipe::Flat;
use super::{DIRECTORY, Error, Image, Images, TEMPORARY, at, manifest, recipe};

/// Steps of a build: the builder's, and the check of what it made.
const ALL_STEPS: u32 = STEPS + 1;

/// Largest tree a build may unpack, bytes.
const ROOM: u64 = 16 << 30;

/// Memory for the tools of a build beside what they unpack: dpkg and apt take 300 MiB, package scripts what they want.
const TOOLS: u64 = 1536 << 20;

/// Least memory for a room in memory: `base` unpacks 0.7 GiB, `browser` 1.6 GiB.
const IN_MEMORY: u64 = 3 << 30;

/// Disk that has to be free before a build begins, bytes: what an Image of `base` takes. Whether it is enough for this one
/// is looked at when its size is known.
const LEAST_DISK: u64 = 600 << 20;

/// Of the queue of events, what only steps may take.
const KEPT_FOR_STEPS: usize = 2 * ALL_STEPS as usize;

/// What a line of the builder can be at most: a log line with everything escaped.
const TOLD: u64 = 8 * LINE as u64;

/// Why there is no Image.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The recipe is wrong.
    #[error(transparent)]
    Recipe(#[from] recipe::Error),
    /// The request contradicts itself.
    #[error("{0}")]
    Request(String),
    /// The builder failed and said why.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// The builder ended without a word.
    #[error("the builder ended early: {reason}")]
    Ended {
        /// How.
        reason: String,
    },
    /// The privileged side refused or is gone.
    #[error("the builder cannot run")]
    Host(#[from] host::Error),
    /// The store of Images.
    #[error(transparent)]
    Images(#[from] Error),
}

/// What is to be built.
#[derive(Clone, Debug)]
pub struct Order {
    recipe: Flat,
    name: String,
    refresh: bool,
    mirror: Option<String>,
}

impl Order {
    /// Reads a request. `mirror` is where this instance gets packages, if it is configured.
    ///
    /// # Errors
    /// [`BuildError::Recipe`], [`BuildError::Request`].
    pub fn new(request: &BuildImage, mirror: Option<String>) -> Result<Self, BuildError> {
        let text = match (&request.recipe, &request.recipe_toml) {
            (Some(name), None) => recipe::shipped(name)?,
            (None, Some(text)) => text.as_str(),
            (None, None) => recipe::shipped(request.name.as_deref().unwrap_or("base"))?,
            (Some(_), Some(_)) => return Err(BuildError::Request("either recipe or recipe_toml, not both".to_owned())),
        };
        let recipe = recipe::resolve(text, &request.packages, &request.files)?;
        let name = request.name.clone().unwrap_or_else(|| recipe.name.clone());
        super::check_name(&name).map_err(|reason| Error::Name { name: name.clone(), reason })?;
        Ok(Order { recipe, name, refresh: request.refresh, mirror })
    }
}

impl Images {
    /// Builds an Image, or finds the one that was built from the same inputs before. Tells `events` what it does; of those
    /// only the steps, progress and log lines: the end is what this returns. `events` should hold at least 32, of which a
    /// reader that is slow gets what there is room for. Dropped before its end, it kills the builder.
    ///
    /// # Errors
    /// Any [`BuildError`]; nothing is left then.
    pub async fn build(
        self: &Arc<Self>,
        host: &Host,
        order: Order,
        events: &mpsc::Sender<BuildEvent>,
    ) -> Result<(Image, bool), BuildError> {
        let _turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            Err(_) => {
                let line = "another image is being built: waiting for it".to_owned();
                let _ = events.try_send(BuildEvent::Log { line });
                self.turn.lock().await
            }
        };
        let inputs = super::inputs_digest(&order.recipe);
        if !order.refresh
            && let Some(image) = self.built_from(&inputs)?
        {
            self.set_name(&order.name, &image.digest)?;
            return Ok((self.find(&image.digest)?, true));
        }
        // What it will take is known at its end; what is no room for anything is known now.
        self.check_room(1)?;
        let directory = self.workplace(&order, &inputs)?;
        let plan = directory.plan()?;
        let events_from = host.build(&plan).await?;
        let running = Running { host, ended: false };
        let failure = follow(events_from, events).await;
        running.end().await.map_err(|error| match &failure {
            Some(failure) => BuildError::Failed(failure.clone()),
            None => BuildError::Host(error),
        })?;
        if let Some(failure) = failure {
            return Err(BuildError::Failed(failure));
        }
        let name = "Check what was built".to_owned();
        let _ = events.try_send(BuildEvent::Step { number: ALL_STEPS, of: ALL_STEPS, name });
        let images = Arc::clone(self);
        let output = directory.path.join(OUTPUT);
        let installed = tokio::task::spawn_blocking(move || {
            if !output.join(manifest::MANIFEST).exists() {
                return Err(BuildError::Ended { reason: "it left no image".to_owned() });
            }
            Ok(images.install(&output, &inputs)?)
        });
        let digest = installed.await.map_err(|error| at("check the image")(io::Error::other(error)))??;
        self.set_name(&order.name, &digest)?;
        Ok((self.find(&digest)?, false))
    }

    /// The directory of one build, with the builder's input in it.
    fn workplace(&self, order: &Order, inputs: &str) -> Result<Workplace, BuildError> {
        let id = uuid::Uuid::now_v7().simple().to_string();
        let path = self.root().join(TEMPORARY).join(&id);
        let step = || format!("make {}", path.display());
        fs::create_dir(&path).map_err(at(step()))?;
        let place = Workplace { relative: format!("{DIRECTORY}/{TEMPORARY}/{id}"), path: path.clone() };
        let room = rustix::fs::statvfs(&place.path).map_err(|error| at("look at the disk")(error.into()))?;
        let available = room.f_bavail * room.f_frsize;
        if available < LEAST_DISK {
            return Err(Failure::Disk { needed_mib: LEAST_DISK >> 20, available_mib: available >> 20 }.into());
        }
        let input = Input { recipe: order.recipe.clone(), inputs: inputs.to_owned(), mirror: order.mirror.clone() };
        let text = serde_json::to_vec(&input).map_err(|error| at(step())(error.into()))?;
        let file = place.path.join(INPUT);
        fs::write(&file, text).map_err(at(step()))?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).map_err(at(step()))?;
        Ok(place)
    }
}

const INPUT: &str = "input.json";
const OUTPUT: &str = "out";

/// The directory of one build. Goes with it.
struct Workplace {
    path: PathBuf,
    relative: String,
}

impl Drop for Workplace {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

impl Workplace {
    fn plan(&self) -> Result<BuildPlan, Error> {
        let path = |name: &str| {
            let path = StatePath::new(format!("{}/{name}", self.relative));
            path.map_err(|error| at("name a file of the build")(io::Error::other(error)))
        };
        let available = memory_available();
        let (room, room_bytes, memory_bytes) = split_memory(available);
        Ok(BuildPlan {
            input: path(INPUT)?,
            output: path(OUTPUT)?,
            files: manifest::FILES.iter().chain([&manifest::MANIFEST]).map(|name| (*name).to_owned()).collect(),
            room,
            room_bytes,
            memory_bytes,
            cpus: std::thread::available_parallelism().map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(1)),
            env: proxies(std::env::vars()),
        })
    }
}

/// Where to unpack and how much memory that takes, by the memory that is available.
fn split_memory(available: u64) -> (Room, u64, u64) {
    if available >= IN_MEMORY + TOOLS {
        let room = (available - TOOLS).min(ROOM);
        (Room::Memory, room, room + TOOLS)
    } else {
        // What it needs less of the page cache it can give back; a cap below what apt needs would only kill it.
        (Room::Disk, ROOM, available.max(TOOLS))
    }
}

/// `MemAvailable`, bytes. Unknown is none: then the disk is used.
fn memory_available() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: u64 = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
    kib << 10
}

/// Variables by which programs are told of a proxy.
fn proxies(variables: impl Iterator<Item = (String, String)>) -> Vec<(String, String)> {
    const NAMES: [&str; 4] = ["http_proxy", "https_proxy", "ftp_proxy", "no_proxy"];
    variables.filter(|(name, _)| NAMES.contains(&name.to_ascii_lowercase().as_str())).take(8).collect()
}

/// A builder that runs. Dropped, it is killed.
struct Running<'a> {
    host: &'a Host,
    ended: bool,
}

impl Running<'_> {
    /// Waits until it is gone and its files are here.
    async fn end(mut self) -> Result<(), host::Error> {
        self.ended = true;
        self.host.build_end().await
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.host.build_kill();
        }
    }
}

/// Passes on what the builder tells until it ends. Returns why it failed, if it said so.
async fn follow(from: OwnedFd, events: &mpsc::Sender<BuildEvent>) -> Option<Failure> {
    let receiver = match tokio::net::unix::pipe::Receiver::from_file(File::from(from)) {
        Ok(receiver) => receiver,
        Err(error) => {
            return Some(Failure::Step { step: "listen to the builder".to_owned(), reason: error.to_string() });
        }
    };
    let mut lines = BufReader::new(receiver);
    let mut line = Vec::new();
    let mut failure = None;
    loop {
        line.clear();
        match (&mut lines).take(TOLD).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return failure,
            Ok(_) => {}
        }
        let event = match serde_json::from_slice(&line) {
            Ok(Told::Step { number, name }) => {
                let name = name.chars().take(80).collect();
                BuildEvent::Step { number: number.clamp(1, ALL_STEPS), of: ALL_STEPS, name }
            }
            Ok(Told::Progress { percent }) => BuildEvent::Progress { percent: percent.min(100) },
            Ok(Told::Log { line }) => BuildEvent::Log { line },
            Ok(Told::Failed { failure: why }) => {
                failure = Some(why);
                continue;
            }
            // A package script that writes where it should not: a line like any other.
            Err(_) => BuildEvent::Log { line: String::from_utf8_lossy(&line).trim_end().to_owned() },
        };
        // A reader that stands still holds up nothing: it misses lines. Steps find room, since nothing else takes the last.
        let passing = !matches!(event, BuildEvent::Step { .. });
        if !passing || events.capacity() > KEPT_FOR_STEPS {
            let _ = events.try_send(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> BuildImage {
        BuildImage::default()
    }

    #[test]
    fn a_request_says_what_to_build() {
        let order = |request: &BuildImage| Order::new(request, None);
        assert_eq!(order(&request()).expect("base").name, "base");
        let dev = BuildImage { name: Some("base-dev".into()), ..request() };
        assert!(order(&dev).expect("dev").recipe.packages.contains("build-essential"));
        let mine = BuildImage {
            name: Some("mine".into()),
            recipe: Some("base".into()),
            packages: vec!["tree".into()],
            ..request()
        };
        let mine = order(&mine).expect("mine");
        assert_eq!(mine.name, "mine");
        assert!(mine.recipe.packages.contains("tree"));
        let both = BuildImage { recipe: Some("base".into()), recipe_toml: Some(String::new()), ..request() };
        assert!(matches!(order(&both), Err(BuildError::Request(_))));
        let unknown = BuildImage { recipe: Some("bose".into()), ..request() };
        assert!(matches!(order(&unknown), Err(BuildError::Recipe(_))));
        let path = BuildImage { name: Some("../x".into()), recipe: Some("base".into()), ..request() };
        assert!(matches!(order(&path), Err(BuildError::Images(Error::Name { .. }))));
    }

    #[test]
    fn memory_is_used_only_where_there_is_enough() {
        assert!(matches!(split_memory(2 << 30), (Room::Disk, _, memory) if memory == 2 << 30));
        assert!(matches!(split_memory(0), (Room::Disk, _, TOOLS)));
        let (room, bytes, memory) = split_memory(8 << 30);
        assert_eq!(room, Room::Memory);
        assert!(bytes >= IN_MEMORY && memory <= 8 << 30 && memory == bytes + TOOLS);
        assert!(matches!(split_memory(1 << 40), (Room::Memory, ROOM, _)));
    }

    #[test]
    fn only_proxies_of_the_environment_are_passed_on() {
        let env = [("HTTPS_PROXY", "a"), ("no_proxy", "b"), ("SECRET", "c"), ("PATH", "d")];
        let passed = proxies(env.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert_eq!(passed.len(), 2);
        assert!(passed.iter().all(|(name, _)| name.to_lowercase().ends_with("_proxy")));
    }

    #[tokio::test]
    async fn a_reader_that_stands_still_gets_the_steps() {
        let (reader, writer) = io::pipe().expect("pipe");
        let (to, mut from) = mpsc::channel(32);
        let writing = std::thread::spawn(move || {
            let mut writer = File::from(OwnedFd::from(writer));
            for number in 1..=STEPS {
                let step = format!("{{\"told\":\"step\",\"number\":{number},\"name\":\"x\"}}\n");
                io::Write::write_all(&mut writer, step.as_bytes()).expect("write");
                for _ in 0..1000 {
                    io::Write::write_all(&mut writer, b"{\"told\":\"log\",\"line\":\"y\"}\n").expect("write");
                }
            }
        });
        // Nobody reads before all of it has been written and followed.
        assert_eq!(follow(OwnedFd::from(reader), &to).await, None);
        writing.join().expect("written");
        drop(to);
        let mut steps = 0;
        while let Some(event) = from.recv().await {
            steps += u32::from(matches!(event, BuildEvent::Step { .. }));
        }
        assert_eq!(steps, STEPS);
    }

    #[tokio::test]
    async fn what_the_builder_tells_is_passed_on() {
        let (reader, writer) = io::pipe().expect("pipe");
        let (to, mut from) = mpsc::channel(100);
        let text = concat!(
            "{\"told\":\"step\",\"number\":2,\"name\":\"Fetch\"}\n",
            "{\"told\":\"progress\",\"percent\":200}\n",
            "not json\n",
            "{\"told\":\"failed\",\"failure\":{\"failure\":\"room\",\"room_mib\":7}}\n",
        );
        let mut writer = File::from(OwnedFd::from(writer));
        io::Write::write_all(&mut writer, text.as_bytes()).expect("write");
        drop(writer);
        let failure = follow(OwnedFd::from(reader), &to).await;
        assert_eq!(failure, Some(Failure::Room { room_mib: 7 }));
        drop(to);
        let mut got = Vec::new();
        while let Some(event) = from.recv().await {
            got.push(event);
        }
        assert_eq!(got.len(), 3);
        assert!(matches!(&got[0], BuildEvent::Step { number: 2, of: ALL_STEPS, name } if name == "Fetch"));
        assert!(matches!(got[1], BuildEvent::Progress { percent: 100 }));
        assert!(matches!(&got[2], BuildEvent::Log { line } if line == "not json"));
    }
}

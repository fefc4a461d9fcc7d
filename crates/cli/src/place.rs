//! Where Pepo is: an edge by URL and key, or the operator's socket of an instance on this machine.
//!
//! In falling order: `--context`, `PEPO_URL` with `PEPO_API_KEY`, `PEPO_CONTEXT`, `PEPO_HOME`, `current` in
//! `~/.config/pepo/config.toml`, the system's instance. The environment is read here and nowhere else.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use pepo_api::client::Client;

use crate::contexts::{self, Contexts};
use crate::fail::{Failure, Outcome};
use crate::tls;

/// The longest `PEPO_HOME` in bytes: sockets below it must fit into 107.
const HOME_BYTES: usize = 40;

/// An instance on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// `PEPO_HOME`, or nothing for the system's instance.
    pub home: Option<PathBuf>,
    /// The App that requests are for, where not the default one.
    pub app: Option<String>,
}

impl Instance {
    fn at(home: Option<PathBuf>) -> Outcome<Self> {
        if let Some(home) = &home {
            let refuse = |why: String| Err(Failure::new(format!("PEPO_HOME={}: {why}", home.display())));
            if !home.is_absolute() {
                return refuse("must be an absolute path".into());
            }
            let bytes = home.as_os_str().as_bytes().len();
            if bytes > HOME_BYTES {
                return refuse(format!(
                    "{bytes} bytes long; at most {HOME_BYTES}, because of the socket paths below it"
                ));
            }
        }
        Ok(Instance { home, app: None })
    }

    /// Where sockets, locks and the log of a background daemon are.
    pub fn run_directory(&self) -> PathBuf {
        self.home.as_ref().map_or_else(|| "/run/pepo".into(), |home| home.join("run"))
    }

    /// What lasts: there once a daemon has run.
    pub fn state_directory(&self) -> PathBuf {
        self.home.as_ref().map_or_else(|| "/var/lib/pepo".into(), |home| home.join("state"))
    }

    /// The operator's socket.
    pub fn socket(&self) -> PathBuf {
        self.run_directory().join("operator.sock")
    }

    /// A client that speaks to it.
    pub fn client(&self) -> Client {
        let client = Client::unix(self.socket());
        match &self.app {
            Some(app) => client.of_app(app),
            None => client,
        }
    }

    /// How one names it in a command line.
    pub fn prefix(&self) -> String {
        self.home.as_ref().map_or_else(String::new, |home| format!("PEPO_HOME={} ", home.display()))
    }
}

/// Where Pepo is.
#[derive(Clone, Debug)]
pub enum Place {
    /// Here.
    Local(Instance),
    /// Behind an edge.
    Remote(Client),
}

impl Place {
    /// The instance, or a refusal for what only its operator may do.
    pub fn local(self, verb: &str) -> Outcome<Instance> {
        match self {
            Place::Local(instance) => Ok(instance),
            Place::Remote(_) => Err(Failure::new(format!("`pepo {verb}` works on the machine that runs Pepo only"))
                .hint("leave PEPO_URL and --context away there")),
        }
    }

    /// A client, whether or not anybody answers.
    pub fn client(&self) -> Client {
        match self {
            Place::Local(instance) => instance.client(),
            Place::Remote(client) => client.clone(),
        }
    }
}

/// The real one.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Finds out where Pepo is, for requests of that App.
pub fn find(context: Option<&str>, app: Option<&str>) -> Outcome<Place> {
    let file = contexts::path(variable);
    let place = resolve(context, file.as_deref(), variable)?;
    Ok(match (place, app) {
        (place, None) => place,
        (Place::Local(instance), Some(app)) => Place::Local(Instance { app: Some(app.to_owned()), ..instance }),
        (Place::Remote(client), Some(app)) => Place::Remote(client.of_app(app)),
    })
}

fn resolve(context: Option<&str>, file: Option<&Path>, variable: impl Fn(&str) -> Option<String>) -> Outcome<Place> {
    if let Some(name) = context {
        return in_context(name, file);
    }
    if let Some(url) = variable("PEPO_URL") {
        let key = variable("PEPO_API_KEY");
        return remote(&url, key.as_deref(), None);
    }
    if let Some(name) = variable("PEPO_CONTEXT") {
        return in_context(&name, file);
    }
    if let Some(home) = variable("PEPO_HOME") {
        return Ok(Place::Local(Instance::at(Some(home.into()))?));
    }
    match load(file)?.current {
        Some(name) => in_context(&name, file),
        None => Ok(Place::Local(Instance::at(None)?)),
    }
}

fn load(file: Option<&Path>) -> Outcome<Contexts> {
    file.map_or_else(|| Ok(Contexts::default()), contexts::load)
}

fn in_context(name: &str, file: Option<&Path>) -> Outcome<Place> {
    let mut known = load(file)?.contexts;
    let Some(context) = known.remove(name) else {
        let names: Vec<_> = known.into_keys().collect();
        let place = file.map_or_else(|| "~/.config/pepo/config.toml".into(), |path| path.display().to_string());
        let failure = Failure::new(format!("there is no context `{name}` in {place}"));
        return Err(match names.is_empty() {
            true => failure.hint(format!("`pepo context add {name} --url URL` makes one")),
            false => failure.hint(format!("there are: {}", names.join(", "))),
        });
    };
    of(name, &context)
}

/// Where a context leads.
pub fn of(name: &str, context: &contexts::Place) -> Outcome<Place> {
    match (&context.url, &context.home) {
        (Some(url), None) => remote(url, context.key.as_deref(), context.ca.as_deref()),
        (None, Some(home)) => Ok(Place::Local(Instance::at(Some(home.clone()))?)),
        _ => Err(Failure::new(format!("context `{name}` needs `url`, or `home`, and not both"))),
    }
}

fn remote(url: &str, key: Option<&str>, ca: Option<&Path>) -> Outcome<Place> {
    let secure = if url.starts_with("https://") { Some(tls::secure(ca)?) } else { None };
    Ok(Place::Remote(Client::remote(url, key, secure)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(place: Outcome<Place>) -> Option<PathBuf> {
        match place.unwrap() {
            Place::Local(instance) => instance.home,
            Place::Remote(client) => panic!("{client:?}"),
        }
    }

    #[test]
    fn each_layer_beats_the_ones_below() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, "current = 'b'\n[contexts.a]\nurl = 'http://h:1'\n[contexts.b]\nhome = '/b'\n").unwrap();
        let file = Some(file.as_path());
        let none = |_: &str| None;
        assert_eq!(local(resolve(None, None, none)), None);
        assert_eq!(local(resolve(None, file, none)), Some("/b".into()));
        let home = |name: &str| (name == "PEPO_HOME").then(|| "/h".to_owned());
        assert_eq!(local(resolve(None, file, home)), Some("/h".into()));
        let url = |name: &str| match name {
            "PEPO_URL" => Some("http://x:1".to_owned()),
            "PEPO_HOME" => Some("/h".to_owned()),
            _ => None,
        };
        assert!(matches!(resolve(None, file, url).unwrap(), Place::Remote(_)));
        assert_eq!(local(resolve(Some("b"), file, url)), Some("/b".into()));
        assert!(matches!(resolve(Some("a"), file, none).unwrap(), Place::Remote(_)));
        let missing = resolve(Some("c"), file, none).unwrap_err();
        assert!(missing.message().starts_with("there is no context `c` in "), "{missing:?}");
    }

    #[test]
    fn a_home_must_be_short_and_absolute() {
        assert!(Instance::at(Some("relative".into())).unwrap_err().message().contains("must be an absolute path"));
        let long = format!("/{}", "x".repeat(40));
        let refused = Instance::at(Some(long.into())).unwrap_err();
        assert!(refused.message().contains("41 bytes long; at most 40"), "{refused:?}");
        let instance = Instance::at(Some("/tmp/p".into())).unwrap();
        assert_eq!(instance.socket(), Path::new("/tmp/p/run/operator.sock"));
        assert_eq!(instance.prefix(), "PEPO_HOME=/tmp/p ");
    }
}

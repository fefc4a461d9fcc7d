//! Settings: `[edge]`, `[issuers.…]` and `[log]` of `pepo.toml`, then `PEPO_EDGE_…` and `PEPO_LOG_LEVEL`, then flags, in
//! rising order. Read once, before anything is bound. The other sections of the file are pepod's, which checks the whole of it.

mod issuers;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use issuers::Issuer;

use pepo_api::{Domain, DomainError};

use crate::net::Ranges;
use crate::rate::Rate;
use crate::tls;

/// Where the edge listens when nobody says otherwise.
pub const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7070);

/// Settings, resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The address; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The daemon's socket.
    pub socket: PathBuf,
    /// Where to write down the URL.
    pub url_file: Option<PathBuf>,
    /// What is logged.
    pub log: String,
    /// What else ends it.
    pub lifeline: Lifeline,
    /// Certificate and key; none: plain HTTP.
    pub tls: Option<tls::Files>,
    /// Whose `X-Forwarded-For` counts.
    pub proxies: Ranges,
    /// Where pages may come from that call us from a browser.
    pub origins: Vec<String>,
    /// Below which ports have host names of their own; none: they have none.
    pub domain: Option<Domain>,
    /// What callers may use up.
    pub limits: Limits,
    /// Whose tokens are taken.
    pub issuers: Vec<Issuer>,
}

/// What callers may use up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests of one key, Session token or subject; none: no limit.
    pub caller: Option<Rate>,
    /// Requests of one App where it is not set to its own; none: no limit.
    pub app: Option<Rate>,
    /// Requests of strangers to one published port.
    pub public: Rate,
    /// Wrong credentials of one source.
    pub failures: Rate,
    /// Requests of one caller that run at once; none: three quarters of the connections.
    pub streams: Option<usize>,
    /// Connections; none: as many as fit.
    pub connections: Option<usize>,
    /// How long what runs gets at the end.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            caller: Some(Rate::of(500)),
            app: Some(Rate::of(1000)),
            public: Rate::of(400),
            failures: Rate { per_second: 1, burst: 20 },
            streams: None,
            connections: None,
            drain: Duration::from_secs(5),
        }
    }
}

/// What ends the edge besides signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifeline {
    /// Nothing.
    None,
    /// The end of its standard input, a pipe whose other end its parent holds.
    StandardInput,
}

/// What the command line asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Start {
    /// Serve.
    Serve(Box<Config>),
    /// Look whether it could, and end.
    Check(Box<Config>),
    /// Print this and end.
    Say(String),
}

/// Why there are no settings.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A flag that nobody knows, or without its value.
    #[error("{0}; see pepo-edge --help")]
    Flag(String),
    /// The file is there and cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The file, a variable or a flag says something that cannot be.
    #[error("{origin}: {reason}")]
    Value {
        /// Where it was typed.
        origin: String,
        /// What is wrong with it.
        reason: String,
    },
}

const HELP: &str = "\
pepo-edge: the Edge API, which lets strangers with a key reach pepod

usage: pepo-edge [--listen ADDRESS:PORT] [--lifeline] [--check]

  --listen ADDRESS:PORT  where to listen (127.0.0.1:7070; a free port with PEPO_HOME); anywhere but on loopback it needs a
                         certificate (edge.certificate, edge.certificate_key)
  --lifeline             end when standard input is closed
  --check                look at the settings and the certificate, and end
  --version, --help";

/// Reads the settings of this process.
///
/// # Errors
/// The first thing that is wrong, with where it was typed.
pub fn from_process() -> Result<Start, Error> {
    read(std::env::args_os().skip(1).collect(), |name| std::env::var_os(name))
}

/// Reads the settings from these arguments and this environment.
///
/// # Errors
/// The first thing that is wrong, with where it was typed.
pub fn read(arguments: Vec<OsString>, variable: impl Fn(&str) -> Option<OsString>) -> Result<Start, Error> {
    use lexopt::Arg::{Long, Short};
    let mut listen_flag = None;
    let mut lifeline = Lifeline::None;
    let mut check = false;
    let mut parser = lexopt::Parser::from_args(arguments);
    while let Some(argument) = parser.next().map_err(|error| Error::Flag(error.to_string()))? {
        match argument {
            Long("listen") => {
                let value = parser.value().map_err(|error| Error::Flag(error.to_string()))?;
                listen_flag = Some(value.to_string_lossy().into_owned());
            }
            Long("lifeline") => lifeline = Lifeline::StandardInput,
            Long("check") => check = true,
            Long("version") | Short('V') => return Ok(Start::Say(format!("pepo-edge {}", env!("CARGO_PKG_VERSION")))),
            Long("help") | Short('h') => return Ok(Start::Say(HELP.into())),
            other => return Err(Error::Flag(other.unexpected().to_string())),
        }
    }

    let text = |name: &str| variable(name).map(|value| value.to_string_lossy().into_owned()).filter(|v| !v.is_empty());
    let home = text("PEPO_HOME").map(PathBuf::from);
    let (file, run) = match &home {
        Some(home) => (home.join("pepo.toml"), home.join("run")),
        None => ("/etc/pepo/pepo.toml".into(), "/run/pepo".into()),
    };
    let typed = Typed { table: from_file(&file)?, file, variable: text };

    let tls = match (typed.get("certificate", path)?, typed.get("certificate_key", path)?) {
        (Some(certificate), Some(key)) => Some(tls::Files { certificate, key }),
        (None, None) => None,
        _ => return Err(typed.wrong("certificate", "certificate and certificate_key are set together")),
    };
    let anywhere = typed.get("plain_http", |text| match text {
        "loopback" => Ok(false),
        "anywhere" => Ok(true),
        _ => Err("expected loopback or anywhere".into()),
    })?;
    let address = |text: &str| -> Result<SocketAddr, String> {
        let address: SocketAddr =
            text.parse().map_err(|_| format!("`{text}` is not an address and a port, as 127.0.0.1:7070"))?;
        if !address.ip().is_loopback() && tls.is_none() && anywhere != Some(true) {
            return Err(format!(
                "{address} is not loopback, and keys would cross the network in clear: set edge.certificate and \
                 edge.certificate_key, or put a proxy that has TLS in front; where the network itself is trusted, say \
                 edge.plain_http = \"anywhere\""
            ));
        }
        Ok(address)
    };
    let listen = match listen_flag {
        Some(value) => Some(address(&value).map_err(|reason| Error::Value { origin: "--listen".into(), reason })?),
        None => typed.get("listen", address)?,
    };
    let usual = Limits::default();
    let rate = |text: &str| number(text, 0, 1_000_000).map(|n| (n > 0).then(|| Rate::of(n)));
    let count = |text: &str| number(text, 1, 1_000_000).map(|n| usize::try_from(n).unwrap_or(usize::MAX));
    let limits = Limits {
        caller: typed.get("requests", rate)?.unwrap_or(usual.caller),
        app: typed.get("app_requests", rate)?.unwrap_or(usual.app),
        public: typed.get("public_requests", |text| number(text, 1, 1_000_000))?.map_or(usual.public, Rate::of),
        failures: typed
            .get("failures", |text| number(text, 1, 10_000))?
            .map_or(usual.failures, |burst| Rate { burst, ..usual.failures }),
        streams: typed.get("streams", count)?,
        connections: typed.get("connections", count)?,
        drain: typed.get("drain", duration)?.unwrap_or(usual.drain),
    };
    let issuers = match typed.table.get("issuers") {
        None => vec![],
        Some(section) => issuers::read(section).map_err(|(setting, reason)| Error::Value {
            origin: format!("{setting} in {}", typed.file.display()),
            reason,
        })?,
    };
    let config = Config {
        listen: listen.unwrap_or(if home.is_some() { SocketAddr::new(LISTEN.ip(), 0) } else { LISTEN }),
        socket: run.join("edge.sock"),
        url_file: home.is_some().then(|| run.join("url")),
        log: typed.log()?,
        lifeline,
        tls,
        proxies: typed.get("trusted_proxies", ranges)?.unwrap_or_default(),
        origins: typed.get("origins", origins)?.unwrap_or_default(),
        domain: typed.get("domain", |text| text.parse().map_err(|error: DomainError| error.to_string()))?,
        limits,
        issuers,
    };
    let config = Box::new(config);
    Ok(if check { Start::Check(config) } else { Start::Serve(config) })
}

/// What was typed, and where.
struct Typed<V> {
    file: PathBuf,
    table: toml::Table,
    variable: V,
}

impl<V: Fn(&str) -> Option<String>> Typed<V> {
    /// A setting of `[edge]`. An empty one is one that is not set.
    fn get<T>(&self, key: &str, read: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, Error> {
        let Some((text, origin)) = self.text("edge", key)? else { return Ok(None) };
        read(text.trim()).map(Some).map_err(|reason| Error::Value { origin, reason })
    }

    fn text(&self, section: &str, key: &str) -> Result<Option<(String, String)>, Error> {
        let name = format!("PEPO_{}_{}", section.to_ascii_uppercase(), key.to_ascii_uppercase());
        if let Some(value) = (self.variable)(&name) {
            return Ok(Some((value, name)));
        }
        let origin = format!("{section}.{key} in {}", self.file.display());
        match self.table.get(section).and_then(|section| section.get(key)) {
            None => Ok(None),
            Some(toml::Value::String(text)) if text.is_empty() => Ok(None),
            Some(toml::Value::String(text)) => Ok(Some((text.clone(), origin))),
            Some(toml::Value::Integer(number)) => Ok(Some((number.to_string(), origin))),
            Some(_) => Err(Error::Value { origin, reason: "expected a text or a number".into() }),
        }
    }

    fn wrong(&self, key: &str, reason: &str) -> Error {
        Error::Value { origin: format!("edge.{key}"), reason: reason.into() }
    }

    fn log(&self) -> Result<String, Error> {
        Ok(self.text("log", "level")?.map_or_else(|| "info".into(), |(text, _)| text))
    }
}

fn from_file(path: &Path) -> Result<toml::Table, Error> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(toml::Table::new()),
        Err(source) => return Err(Error::Read { path: path.into(), source }),
    };
    text.parse().map_err(|error: toml::de::Error| Error::Value {
        origin: path.display().to_string(),
        reason: error.to_string().trim_end().into(),
    })
}

fn path(text: &str) -> Result<PathBuf, String> {
    match Path::new(text) {
        path if path.is_absolute() => Ok(path.into()),
        _ => Err(format!("`{text}` is not an absolute path")),
    }
}

fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty())
}

fn ranges(text: &str) -> Result<Ranges, String> {
    Ranges::read(parts(text))
        .ok_or_else(|| format!("`{text}` is not a list of addresses and ranges, as 10.0.0.0/8, ::1"))
}

fn origins(text: &str) -> Result<Vec<String>, String> {
    let one = |part: &str| {
        let rest = part.strip_prefix("https://").or_else(|| part.strip_prefix("http://"))?;
        let plain = !rest.is_empty()
            && rest.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b".-:[]".contains(&b));
        plain.then(|| part.to_owned())
    };
    let all: Option<_> = parts(text).map(one).collect();
    all.ok_or_else(|| format!("`{text}` is not a list of origins, as https://app.example.com"))
}

fn number(text: &str, least: u64, most: u64) -> Result<u64, String> {
    let number = text.parse().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| format!("`{text}` is not a number from {least} to {most}"))
}

/// `90s`, `5m`, `1h`; a bare number is seconds.
fn duration(text: &str) -> Result<Duration, String> {
    let (digits, unit) = match text.char_indices().find(|(_, c)| !c.is_ascii_digit()) {
        Some((at, _)) => text.split_at(at),
        None => (text, "s"),
    };
    let times = match unit {
        "s" => Some(1),
        "m" => Some(60),
        "h" => Some(3600),
        _ => None,
    };
    let seconds = digits.parse::<u64>().ok().zip(times).and_then(|(n, times)| n.checked_mul(times));
    seconds.map(Duration::from_secs).ok_or_else(|| format!("`{text}` is not a time, as 30s, 5m, 1h"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_with(arguments: &[&str], environment: &[(&str, &str)]) -> Result<Start, Error> {
        let environment: Vec<(String, OsString)> =
            environment.iter().map(|(name, value)| ((*name).to_owned(), OsString::from(value))).collect();
        read(arguments.iter().map(OsString::from).collect(), |name| {
            environment.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone())
        })
    }

    fn config(start: Result<Start, Error>) -> Config {
        match start {
            Ok(Start::Serve(config)) => *config,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_instance_takes_a_free_port_and_writes_it_down() {
        let home = tempfile::tempdir().expect("directory");
        let path = home.path().to_str().expect("utf-8");
        let config = config(read_with(&["--lifeline"], &[("PEPO_HOME", path)]));
        assert_eq!(config.listen.port(), 0);
        assert_eq!(config.socket, home.path().join("run/edge.sock"));
        assert_eq!(config.url_file, Some(home.path().join("run/url")));
        assert_eq!(config.lifeline, Lifeline::StandardInput);
    }

    #[test]
    fn later_layers_win() {
        let home = tempfile::tempdir().expect("directory");
        let path = home.path().to_str().expect("utf-8");
        std::fs::write(home.path().join("pepo.toml"), "[edge]\nlisten = \"127.0.0.1:1\"\n[sandbox]\ncpus = 2\n")
            .expect("file");
        assert_eq!(config(read_with(&[], &[("PEPO_HOME", path)])).listen.port(), 1);
        let environment = [("PEPO_HOME", path), ("PEPO_EDGE_LISTEN", "127.0.0.1:2")];
        assert_eq!(config(read_with(&[], &environment)).listen.port(), 2);
        assert_eq!(config(read_with(&["--listen", "[::1]:3"], &environment)).listen.port(), 3);
    }

    #[test]
    fn what_is_wrong_says_where_it_was_typed() {
        let error = read_with(&[], &[("PEPO_EDGE_LISTEN", "7070")]).expect_err("refused").to_string();
        assert!(error.contains("PEPO_EDGE_LISTEN") && error.contains("127.0.0.1:7070"), "{error}");
        let error = read_with(&["--listen", "0.0.0.0:7070"], &[]).expect_err("refused").to_string();
        assert!(error.contains("loopback"), "{error}");
        assert!(read_with(&["--nothing"], &[]).is_err());
    }

    #[test]
    fn plain_http_stays_on_loopback_unless_it_is_forced() {
        let home = tempfile::tempdir().expect("directory");
        let path = home.path().to_str().expect("utf-8");
        let with = |text: &str| {
            std::fs::write(home.path().join("pepo.toml"), text).expect("file");
            read_with(&["--listen", "0.0.0.0:7070"], &[("PEPO_HOME", path)])
        };
        assert!(with("").expect_err("refused").to_string().contains("certificate"));
        assert!(with("[edge]\nplain_http = \"anywhere\"\n").is_ok());
        assert!(with("[edge]\ncertificate = \"/c.pem\"\n").expect_err("half").to_string().contains("together"));
        let tls = config(with("[edge]\ncertificate = \"/c.pem\"\ncertificate_key = \"/k.pem\"\n")).tls.expect("tls");
        assert_eq!((tls.certificate, tls.key), ("/c.pem".into(), "/k.pem".into()));
        assert!(with("[edge]\nplain_http = \"yes\"\n").is_err());
        let relative = with("[edge]\ncertificate = \"c.pem\"\ncertificate_key = \"/k.pem\"\n");
        assert!(relative.expect_err("refused").to_string().contains("absolute"));
    }

    #[test]
    fn limits_and_neighbours_are_set_in_the_file_and_over_it() {
        let home = tempfile::tempdir().expect("directory");
        let path = home.path().to_str().expect("utf-8");
        let text = "[edge]\nrequests = 50\napp_requests = 0\nfailures = 7\nstreams = 9\nconnections = 64\ndrain = \"1m\"\n\
            public_requests = 60\ndomain = \"preview.example.com\"\n\
            trusted_proxies = \"10.0.0.0/8, ::1\"\norigins = \"https://app.example.com\"\n";
        std::fs::write(home.path().join("pepo.toml"), text).expect("file");
        let typed = config(read_with(&[], &[("PEPO_HOME", path)]));
        let limits = Limits {
            caller: Some(Rate { per_second: 50, burst: 100 }),
            app: None,
            public: Rate { per_second: 60, burst: 120 },
            failures: Rate { per_second: 1, burst: 7 },
            streams: Some(9),
            connections: Some(64),
            drain: Duration::from_secs(60),
        };
        assert_eq!(typed.limits, limits);
        assert!(typed.proxies.have("10.1.2.3".parse().expect("address")));
        assert_eq!(typed.origins, ["https://app.example.com"]);
        assert_eq!(typed.domain.as_ref().map(Domain::as_str), Some("preview.example.com"));
        let over = config(read_with(&[], &[("PEPO_HOME", path), ("PEPO_EDGE_REQUESTS", "0")]));
        assert_eq!(over.limits.caller, None);
        for (name, value) in [
            ("PEPO_EDGE_REQUESTS", "-1"),
            ("PEPO_EDGE_TRUSTED_PROXIES", "anywhere"),
            ("PEPO_EDGE_ORIGINS", "*"),
            ("PEPO_EDGE_DOMAIN", "*.example.com"),
            ("PEPO_EDGE_PUBLIC_REQUESTS", "0"),
            ("PEPO_EDGE_DRAIN", "soon"),
        ] {
            let error = read_with(&[], &[("PEPO_HOME", path), (name, value)]).expect_err(name).to_string();
            assert!(error.starts_with(name), "{error}");
        }
        std::fs::write(home.path().join("pepo.toml"), "[issuers.corp]\nissuer = \"x\"\n").expect("file");
        let error = read_with(&[], &[("PEPO_HOME", path)]).expect_err("refused").to_string();
        assert!(error.contains("issuers.corp.audience"), "{error}");
    }
}

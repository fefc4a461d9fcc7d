//! Settings: `[edge]` and `[log]` of `pepo.toml`, then `PEPO_EDGE_LISTEN` and `PEPO_LOG_LEVEL`, then flags, in rising order.
//! Read once, before anything is bound. The other sections of the file are pepod's, which checks the whole of it.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

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
    Serve(Config),
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

usage: pepo-edge [--listen ADDRESS:PORT] [--lifeline]

  --listen ADDRESS:PORT  where to listen (127.0.0.1:7070; a free port with PEPO_HOME); only loopback, there is no TLS
  --lifeline             end when standard input is closed
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
    let mut parser = lexopt::Parser::from_args(arguments);
    while let Some(argument) = parser.next().map_err(|error| Error::Flag(error.to_string()))? {
        match argument {
            Long("listen") => {
                let value = parser.value().map_err(|error| Error::Flag(error.to_string()))?;
                listen_flag = Some(value.to_string_lossy().into_owned());
            }
            Long("lifeline") => lifeline = Lifeline::StandardInput,
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
    let typed = from_file(&file)?;
    let address = |text: String, origin: String| -> Result<SocketAddr, Error> {
        let address: SocketAddr = text.parse().map_err(|_| Error::Value {
            origin: origin.clone(),
            reason: format!("`{text}` is not an address and a port, as 127.0.0.1:7070"),
        })?;
        if !address.ip().is_loopback() {
            let reason =
                format!("{address} is not loopback, and there is no TLS yet: put a proxy that has it in front");
            return Err(Error::Value { origin, reason });
        }
        Ok(address)
    };
    let listen = if let Some(value) = listen_flag {
        address(value, "--listen".into())?
    } else if let Some(value) = text("PEPO_EDGE_LISTEN") {
        address(value, "PEPO_EDGE_LISTEN".into())?
    } else if let Some(value) = typed.listen {
        address(value, format!("edge.listen in {}", file.display()))?
    } else if home.is_some() {
        SocketAddr::new(LISTEN.ip(), 0)
    } else {
        LISTEN
    };
    Ok(Start::Serve(Config {
        listen,
        socket: run.join("edge.sock"),
        url_file: home.is_some().then(|| run.join("url")),
        log: text("PEPO_LOG_LEVEL").or(typed.log).unwrap_or_else(|| "info".into()),
        lifeline,
    }))
}

#[derive(Default)]
struct Typed {
    listen: Option<String>,
    log: Option<String>,
}

fn from_file(path: &Path) -> Result<Typed, Error> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Typed::default()),
        Err(source) => return Err(Error::Read { path: path.into(), source }),
    };
    let wrong = |reason: String| Error::Value { origin: path.display().to_string(), reason };
    let table: toml::Table =
        text.parse().map_err(|error: toml::de::Error| wrong(error.to_string().trim_end().into()))?;
    let one = |section: &str, key: &str| match table.get(section).and_then(|section| section.get(key)) {
        None => Ok(None),
        Some(toml::Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(wrong(format!("{section}.{key}: expected a text"))),
    };
    Ok(Typed { listen: one("edge", "listen")?, log: one("log", "level")? })
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
            Ok(Start::Serve(config)) => config,
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
}

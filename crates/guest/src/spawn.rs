//! From what the host asked to a running program: environment, user, search path, descriptors.
//!
//! Owns the composition of a command's environment and the mapping of failures to what a shell would say (126, 127).
//! Called by `exec` and `shell`; the system calls are in `sys`.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use pepo_proto::{FailureCode, Outcome, Variable};
use rustix::io::Errno;

use crate::stream::failed;
use crate::sys::{self, Identity, Program, Step};
use crate::tree;
use crate::user::User;

/// Where programs are looked for when nothing says otherwise.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The largest `/etc/environment` that is read.
const MAX_ENVIRONMENT: u64 = 256 << 10;

/// A list of variables, each name once, the last value winning.
#[derive(Clone, Debug, Default)]
pub struct Environment(Vec<(String, String)>);

impl Environment {
    /// The Image's own: `/etc/environment` under `root`.
    pub fn of_image(root: &Path) -> Self {
        let mut environment = Environment::default();
        environment.set("PATH", DEFAULT_PATH);
        environment.set("LANG", "C.UTF-8");
        let mut text = String::new();
        if let Ok(file) = std::fs::File::open(root.join("etc/environment")) {
            use std::io::Read;
            // What is not text is as if it were not there.
            let _ = file.take(MAX_ENVIRONMENT).read_to_string(&mut text);
        }
        for line in text.lines() {
            let line = line.trim();
            let line = line.strip_prefix("export ").unwrap_or(line);
            if let Some((name, value)) = line.split_once('=')
                && !name.is_empty()
                && !name.starts_with('#')
            {
                environment.set(name, unquoted(value));
            }
        }
        environment
    }

    /// Sets one variable.
    pub fn set(&mut self, name: &str, value: &str) {
        match self.0.iter_mut().find(|variable| variable.0 == name) {
            Some(variable) => value.clone_into(&mut variable.1),
            None => self.0.push((name.to_owned(), value.to_owned())),
        }
    }

    /// The value of a variable.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|variable| variable.0 == name).map(|variable| variable.1.as_str())
    }

    /// Sets what the host asked for.
    ///
    /// # Errors
    /// [`FailureCode::Invalid`] for a name or value that no environment can hold.
    pub fn add(&mut self, variables: &[Variable]) -> Result<(), Outcome> {
        for Variable { name, value } in variables {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                return Err(failed(
                    FailureCode::Invalid,
                    format!("{name:?} cannot be a variable, or its value cannot"),
                ));
            }
            self.set(name, value);
        }
        Ok(())
    }

    /// Sets what depends on the user.
    pub fn of_user(&mut self, user: &User) {
        self.set("HOME", &user.home.to_string_lossy());
        self.set("USER", &user.name);
        self.set("LOGNAME", &user.name);
        self.set("SHELL", &user.shell.to_string_lossy());
    }
}

fn unquoted(value: &str) -> &str {
    for quote in ['"', '\''] {
        if let Some(inner) = value.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote)) {
            return inner;
        }
    }
    value
}

/// A program with everything it needs but its descriptors. Free of borrowed data: it is started on another thread.
pub struct Launch {
    candidates: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
    cwd: Vec<CString>,
    identity: Option<Identity>,
    name: String,
    shown_cwd: String,
}

fn c_string(what: &str, bytes: impl Into<Vec<u8>>) -> Result<CString, Outcome> {
    CString::new(bytes).map_err(|_| failed(FailureCode::Invalid, format!("{what} has a NUL byte in it")))
}

impl Launch {
    /// Prepares `argv` to run as `user` with this environment, in `cwd` or else at home.
    pub fn new(
        argv: &[String],
        environment: &Environment,
        cwd: Option<&str>,
        user: &User,
        mark: Option<&str>,
    ) -> Result<Self, Outcome> {
        let Some(name) = argv.first().filter(|name| !name.is_empty()) else {
            return Err(failed(FailureCode::Invalid, "no program is named"));
        };
        let candidates = if name.contains('/') {
            vec![c_string("the program", name.as_bytes())?]
        } else {
            let path = environment.get("PATH").unwrap_or(DEFAULT_PATH);
            path.split(':')
                .map(|directory| if directory.is_empty() { "." } else { directory })
                .map(|directory| c_string("the program", format!("{directory}/{name}")))
                .collect::<Result<_, _>>()?
        };
        let mut env = environment
            .0
            .iter()
            .map(|(name, value)| c_string("a variable", format!("{name}={value}")))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(mark) = mark {
            env.push(c_string("the mark", format!("{}={mark}", tree::MARK))?);
        }
        let home = user.home.as_os_str().as_bytes();
        let cwd = match cwd {
            Some(cwd) if cwd.starts_with('/') => vec![c_string("the working directory", cwd)?],
            Some(cwd) => vec![c_string("the working directory", [home, b"/", cwd.as_bytes()].concat())?],
            // A user without a home still gets a shell.
            None => vec![c_string("the home directory", home)?, c_string("the root", "/")?],
        };
        let identity = rustix::process::geteuid().is_root().then(|| Identity {
            uid: user.uid,
            gid: user.gid,
            groups: user.groups.clone(),
        });
        Ok(Launch {
            candidates,
            argv: argv.iter().map(|word| c_string("an argument", word.as_bytes())).collect::<Result<_, _>>()?,
            env,
            shown_cwd: cwd.first().map(|cwd| cwd.to_string_lossy().into_owned()).unwrap_or_default(),
            cwd,
            identity,
            name: name.clone(),
        })
    }

    /// Starts it. Blocks until it runs.
    pub fn start(&self, wiring: &Wiring) -> Result<(i32, OwnedFd), Outcome> {
        let [stdin, stdout, stderr] = &wiring.stdio;
        let extra: Vec<(BorrowedFd<'_>, RawFd)> =
            wiring.extra.iter().map(|(fd, number)| (fd.as_fd(), *number)).collect();
        let program = Program {
            candidates: &self.candidates,
            argv: &self.argv,
            env: &self.env,
            cwd: &self.cwd,
            stdio: [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
            extra: &extra,
            terminal: wiring.terminal,
            identity: self.identity.as_ref(),
            group: wiring.group.as_ref().map(|group| group.as_fd()),
            reset_oom: wiring.in_guest,
            dies_with_caller: !wiring.in_guest,
        };
        sys::spawn(&program).map_err(|(step, errno)| self.failure(step, errno))
    }

    fn failure(&self, step: Step, errno: Errno) -> Outcome {
        let error = io::Error::from(errno);
        let name = &self.name;
        match (step, errno) {
            (Step::Exec, Errno::NOENT | Errno::NOTDIR) => {
                let hint = if name.contains('/') { " (or what its first line names is not there)" } else { "" };
                failed(FailureCode::ProgramNotFound, format!("{name}: not found{hint}"))
            }
            (Step::Exec, Errno::TOOBIG) => {
                failed(FailureCode::Invalid, format!("{name}: arguments and environment are too long"))
            }
            (Step::Exec, Errno::NOMEM | Errno::AGAIN) | (Step::Clone, _) => {
                failed(FailureCode::Busy, format!("{name}: no process can be made: {error}"))
            }
            (Step::Exec, _) => {
                failed(FailureCode::ProgramNotExecutable, format!("{name}: cannot be executed: {error}"))
            }
            (Step::Cwd, _) => {
                let code = match errno {
                    Errno::NOENT => FailureCode::NotFound,
                    Errno::NOTDIR => FailureCode::NotDirectory,
                    Errno::ACCESS => FailureCode::Denied,
                    _ => FailureCode::Io,
                };
                failed(code, format!("working directory {}: {error}", self.shown_cwd))
            }
            (Step::Identity, _) => failed(FailureCode::Denied, format!("{name}: cannot become the user: {error}")),
            (Step::Setup, _) => failed(FailureCode::Io, format!("{name}: cannot be set up: {error}")),
        }
    }
}

/// What a program is connected to.
pub struct Wiring {
    /// Descriptors 0, 1 and 2.
    pub stdio: [Arc<OwnedFd>; 3],
    /// Further ones, with their numbers.
    pub extra: Vec<(OwnedFd, RawFd)>,
    /// Whether they are a terminal that becomes its own.
    pub terminal: bool,
    /// The control group it is born in.
    pub group: Option<Arc<OwnedFd>>,
    /// Whether this is a guest, and not a host process.
    pub in_guest: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_values_win_and_quotes_go() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("etc")).unwrap();
        std::fs::write(
            directory.path().join("etc/environment"),
            "# no\nPATH=\"/opt/venv/bin:/bin\"\nexport TZ='UTC'\n=x\nODD\nA=1=2\n",
        )
        .unwrap();
        let mut environment = Environment::of_image(directory.path());
        assert_eq!(environment.get("PATH"), Some("/opt/venv/bin:/bin"));
        assert_eq!(environment.get("TZ"), Some("UTC"));
        assert_eq!(environment.get("A"), Some("1=2"));
        let variable = |name: &str, value: &str| Variable { name: name.into(), value: value.into() };
        environment.add(&[variable("A", "3"), variable("A", "4")]).unwrap();
        assert_eq!(environment.get("A"), Some("4"));
        for (name, value) in [("", "x"), ("a=b", "x"), ("a\0", "x"), ("a", "\0")] {
            assert!(environment.add(&[variable(name, value)]).is_err());
        }
    }
}

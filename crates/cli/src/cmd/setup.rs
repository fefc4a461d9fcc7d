//! `pepo setup`: gets the one foreign release that this host may lack. The system's `curl` gets it, as whoever calls; `pepod`
//! looks at what came and installs it.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use clap::Args;
use pepo_api::{SetupReport, SetupState};

use crate::fail::{self, Failure, Outcome};
use crate::place::{Instance, Place, variable};
use crate::{render, terminal, tool};

/// The largest release, bytes: what comes beyond is not it.
const LARGEST: u64 = 64 << 20;

#[derive(Debug, Args)]
pub struct Setup {
    /// Only look; change nothing
    #[arg(long, conflicts_with = "from")]
    check: bool,
    /// Install from a file instead of getting one
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Setup {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let instance = place.local("setup")?;
        let report: SetupReport = tool::ask(&instance, &["setup", "--check", "--json"]).await?;
        let wanted = matches!(report.state, SetupState::Missing | SetupState::Damaged);
        if self.check || !wanted && self.from.is_none() {
            return self.tell(&report);
        }
        if !rustix::process::geteuid().is_root() {
            return Err(Failure::new(format!("{}: {}", report.name, report.found)).hint("sudo pepo setup"));
        }
        let report = match &self.from {
            Some(file) => install(&instance, file).await?,
            None => {
                let file = get(&report)?;
                let installed = install(&instance, &file).await;
                // A file that is not the release would be refused again; one that is installed is needed no more.
                if let Err(error) = fs::remove_file(&file) {
                    fail::note(format!("{}: {error}", file.display()));
                }
                installed?
            }
        };
        fail::note("a daemon that runs takes it from its next start on");
        self.tell(&report)
    }

    fn tell(&self, report: &SetupReport) -> Outcome<u8> {
        if self.json {
            render::json(report)?
        } else {
            render::out(&text(report))?
        }
        Ok(u8::from(matches!(report.state, SetupState::Missing | SetupState::Damaged)))
    }
}

fn text(report: &SetupReport) -> String {
    let mut text = format!("{} {}\n", report.name, crate::escape::line(&report.found));
    if !report.directory.is_empty() {
        text.push_str(&format!("  in        {}\n", report.directory));
    }
    if matches!(report.state, SetupState::Missing | SetupState::Damaged) {
        text.push_str(&format!("  from      {}\n  sha256    {}\n", crate::escape::line(&report.url), report.sha256));
        text.push_str("  -> sudo pepo setup\n");
    }
    text
}

async fn install(instance: &Instance, file: &Path) -> Outcome<SetupReport> {
    let path = file.to_str().ok_or_else(|| Failure::new(format!("{} is not UTF-8", file.display())))?;
    tool::ask(instance, &["setup", "--from", path, "--json"]).await
}

/// Where a file is kept until it is whole.
fn cache() -> PathBuf {
    let own = || variable("HOME").map(|home| Path::new(&home).join(".cache"));
    variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(own).unwrap_or_else(|| "/var/cache".into()).join("pepo")
}

/// Gets the release, from where an earlier try ended.
fn get(report: &SetupReport) -> Outcome<PathBuf> {
    let directory = cache();
    let failed = |what: &str, error: std::io::Error| Failure::new(format!("{what} {}: {error}", directory.display()));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(|error| failed("make", error))?;
    let whole = directory.join(&report.file);
    let part = directory.join(format!("{}.part", report.file));
    let mut out = File::options()
        .read(true)
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
        .open(&part)
        .map_err(|error| failed("write in", error))?;
    let have = out.metadata().map_err(|error| failed("look at", error))?.size();
    fail::note(match have {
        0 => format!("getting {}", crate::escape::line(&report.url)),
        _ => format!("getting the rest of {}, {} are there", crate::escape::line(&report.url), render::size(have)),
    });
    match curl(&report.url, have, &mut out)? {
        Got::Whole => {}
        // It has no parts to give, or another file by now: from the beginning, once.
        Got::NoParts => {
            out.set_len(0).and_then(|()| out.seek(SeekFrom::Start(0))).map_err(|error| failed("write in", error))?;
            if curl(&report.url, 0, &mut out)? == Got::NoParts {
                return Err(Failure::new(format!("{} does not give a file", report.url)));
            }
        }
    }
    out.flush().and_then(|()| out.sync_all()).map_err(|error| failed("write in", error))?;
    fs::rename(&part, &whole).map_err(|error| failed("write in", error))?;
    Ok(whole)
}

#[derive(Debug, PartialEq, Eq)]
enum Got {
    Whole,
    NoParts,
}

/// Appends what the address has from `have` on. Under `sudo`, curl runs as whoever called that: it writes to a pipe and
/// needs no file of root's.
fn curl(url: &str, have: u64, out: &mut File) -> Outcome<Got> {
    let mut command = std::process::Command::new("curl");
    command.args(["--fail", "--location", "--proto", "=https,http,file", "--proto-redir", "=https,http"]);
    command.args(["--retry", "3", "--connect-timeout", "30", "--speed-limit", "1", "--speed-time", "60"]);
    command.args(["--max-filesize", &LARGEST.to_string(), "--output", "-", "--continue-at", &have.to_string()]);
    command.args(if terminal::interactive() { &["--progress-bar"][..] } else { &["--silent", "--show-error"] });
    command.arg("--").arg(url);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let id = |name: &str| variable(name).and_then(|text| text.parse::<u32>().ok());
    if let (Some(uid), Some(gid)) = (id("SUDO_UID"), id("SUDO_GID"))
        && rustix::process::geteuid().is_root()
    {
        command.uid(uid).gid(gid).current_dir("/");
    }
    let missing = |error: std::io::Error| Failure::new(format!("curl: {error}")).hint("apt install curl");
    let mut child = command.spawn().map_err(missing)?;
    let copied = child.stdout.take().map(|from| std::io::copy(&mut std::io::Read::take(from, LARGEST), out));
    let status = child.wait().map_err(missing)?;
    copied.transpose().map_err(|error| Failure::new(format!("what came could not be kept: {error}")))?;
    match status.code() {
        Some(0) => Ok(Got::Whole),
        // No ranges, a bad place to go on from, or one past its end.
        Some(33 | 36) => Ok(Got::NoParts),
        Some(22) if have > 0 => Ok(Got::NoParts),
        _ => Err(Failure::new(format!("curl did not get {} ({status})", crate::escape::line(url))).hint(
            "call again to go on from here; without a network, `pepo setup --from FILE` takes a file from elsewhere",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_told_with_whence_and_what_to_do() {
        let report = SetupReport {
            name: "Melon".into(),
            version: "1".into(),
            arch: "x86_64".into(),
            state: SetupState::Missing,
            found: "not installed".into(),
            directory: "/var/lib/pepo/melon".into(),
            url: "https://example.org/\x1b[2J".into(),
            file: "melon.tgz".into(),
            sha256: "ab".into(),
        };
        let expected = "Melon not installed\n  in        /var/lib/pepo/melon\n  from      https://example.org/\\x1b[2J\n  sha256    ab\n  -> sudo pepo setup\n";
        assert_eq!(text(&report), expected);
        let there = SetupReport { state: SetupState::Installed, found: "v1, as released".into(), ..report };
        assert_eq!(text(&there), "Melon v1, as released\n  in        /var/lib/pepo/melon\n");
    }
}

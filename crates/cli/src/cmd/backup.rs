//! `pepo backup …`: what of an instance cannot be made again, in one file, and back.

use std::io::{IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use pepo_api::RestoreReport;
use pepo_api::client::ByteStream;

use crate::fail::{self, Failure, Outcome};
use crate::interrupt::Interrupts;
use crate::place::Place;
use crate::{escape, render, tool};

#[derive(Debug, Subcommand)]
pub enum Backup {
    /// Write a backup: store, keys, settings, recipes of Images; whoever has it has the secrets in it
    Create(Create),
    /// Put a backup in place of what is there; the daemon must not run
    Restore(Restore),
}

#[derive(Debug, Args)]
pub struct Create {
    /// The file; `-` is standard output
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

#[derive(Debug, Args)]
pub struct Restore {
    /// Move a store that is there aside
    #[arg(long)]
    replace: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The file; `-` is standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

impl Backup {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        match self {
            Backup::Create(verb) => {
                let client = place.local("backup")?.client();
                let mut interrupts = Interrupts::new()?;
                let working = async {
                    let stream = client.backup().await?;
                    verb.write(stream).await
                };
                match interrupts.unless(working).await {
                    Ok(done) => done.map(|()| 0),
                    Err(caught) => Ok(caught.exit_code()),
                }
            }
            Backup::Restore(verb) => {
                let instance = place.local("backup")?;
                let from = verb.open()?;
                let mut arguments = vec!["restore", "--json"];
                arguments.extend(verb.replace.then_some("--replace"));
                let report: RestoreReport = tool::ask_of(&instance, &arguments, from).await?;
                if verb.json {
                    render::json(&report)?;
                } else {
                    render::out(&said(&report))?;
                }
                Ok(0)
            }
        }
    }
}

/// A file that is complete under its name, or not there under it.
struct Partial {
    path: PathBuf,
    done: bool,
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.done {
            // What is left says `.part`.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Create {
    async fn write(&self, mut stream: ByteStream) -> Outcome<()> {
        if self.file.as_os_str() == "-" {
            if std::io::stdout().is_terminal() {
                return Err(Failure::new("a backup does not go to a terminal").hint("name a file"));
            }
            while let Some(piece) = stream.next().await? {
                std::io::stdout().write_all(&piece)?;
            }
            return Ok(std::io::stdout().flush()?);
        }
        let told = |what: &str, error: std::io::Error| Failure::new(format!("{what} {}: {error}", self.file.display()));
        if self.file.symlink_metadata().is_ok() {
            return Err(Failure::new(format!("{} is there already", self.file.display())));
        }
        let mut partial = Partial { path: part(&self.file), done: false };
        let mut file = std::fs::File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&partial.path)
            .map_err(|error| told("cannot write", error))?;
        let mut bytes = 0u64;
        while let Some(piece) = stream.next().await? {
            file.write_all(&piece).map_err(|error| told("cannot write", error))?;
            bytes += piece.len() as u64;
        }
        file.sync_all().map_err(|error| told("cannot keep", error))?;
        std::fs::rename(&partial.path, &self.file).map_err(|error| told("cannot name", error))?;
        partial.done = true;
        fail::note(format!(
            "{} in {}; it holds the key of secrets. Not in it: Sandboxes, files of Images, Workspaces",
            render::size(bytes),
            self.file.display()
        ));
        Ok(())
    }
}

fn part(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

impl Restore {
    fn open(&self) -> Outcome<std::process::Stdio> {
        if self.file.as_os_str() == "-" {
            return Ok(std::process::Stdio::inherit());
        }
        let opened = std::fs::File::open(&self.file);
        let file = opened.map_err(|error| Failure::new(format!("{}: {error}", self.file.display())))?;
        Ok(file.into())
    }
}

fn said(report: &RestoreReport) -> String {
    let mut text = format!("restored what was at {}\n", render::time(report.manifest.made_at));
    for note in &report.notes {
        text.push_str(&format!("{}\n", escape::line(note)));
    }
    for lack in &report.manifest.lacks {
        text.push_str(&format!("not in it: {}\n", escape::line(lack)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said() {
        let report: RestoreReport = serde_json::from_value(serde_json::json!({
            "manifest": {"format": 1, "release": "1", "schema": 3, "made_at": "2026-03-01T10:00:00Z", "files": {},
                         "lacks": ["Workspaces"]},
            "notes": ["moved\u{1b} aside"],
        }))
        .unwrap();
        assert_eq!(
            said(&report),
            "restored what was at 2026-03-01 10:00:00 UTC\nmoved\\x1b aside\nnot in it: Workspaces\n"
        );
    }

    #[test]
    fn half_a_backup_does_not_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = part(&dir.path().join("b.tar"));
        assert!(path.ends_with("b.tar.part"));
        std::fs::write(&path, "x").unwrap();
        drop(Partial { path: path.clone(), done: false });
        assert!(!path.exists());
    }
}

//! `pepo context …`: names for Pepos elsewhere. A key goes into the file and is never shown.

use std::io::Read;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::Serialize;

use crate::contexts::{self, Contexts, Place};
use crate::fail::{Failure, Outcome};
use crate::{place, render};

#[derive(Debug, Subcommand)]
pub enum Context {
    /// Give a Pepo a name; its key comes from PEPO_API_KEY or from a file, not from the command line
    Add(Add),
    /// Mean that one where none is named
    Use(One),
    /// List them
    Ls(Ls),
    /// Forget one
    Rm(One),
}

#[derive(Debug, Args)]
pub struct Add {
    /// Its name
    #[arg(value_name = "NAME")]
    name: String,
    /// The URL of its edge
    #[arg(long, value_name = "URL", required_unless_present = "home", conflicts_with = "home")]
    url: Option<String>,
    /// A file with the key in it (`-`: standard input)
    #[arg(long, value_name = "FILE", conflicts_with = "home")]
    key_file: Option<PathBuf>,
    /// A file of certificates (PEM) that vouch for the edge, in place of the system's
    #[arg(long, value_name = "FILE", conflicts_with = "home")]
    ca: Option<PathBuf>,
    /// PEPO_HOME of an instance on this machine
    #[arg(long, value_name = "DIR")]
    home: Option<PathBuf>,
    /// Mean it from now on where none is named
    #[arg(long = "use")]
    use_it: bool,
}

#[derive(Debug, Args)]
pub struct One {
    /// Which
    #[arg(value_name = "NAME")]
    name: String,
}

#[derive(Debug, Args)]
pub struct Ls {
    /// Print names alone
    #[arg(short, long)]
    quiet: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// One as it is shown.
#[derive(Serialize)]
struct Shown<'a> {
    name: &'a str,
    current: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    home: Option<String>,
    has_key: bool,
}

impl Context {
    pub fn run(&self) -> Outcome<u8> {
        let path = contexts::path(place::variable)
            .ok_or_else(|| Failure::new("neither HOME nor XDG_CONFIG_HOME says where settings are"))?;
        let mut all = contexts::load(&path)?;
        match self {
            Context::Ls(verb) => verb.show(&all)?,
            Context::Add(verb) => {
                let made = verb.place()?;
                // What cannot be spoken to is told now, not at the first use.
                place::of(&verb.name, &made)?;
                all.contexts.insert(verb.name.clone(), made);
                if verb.use_it {
                    all.current = Some(verb.name.clone());
                }
                contexts::save(&path, &all)?;
            }
            Context::Use(verb) => {
                known(&all, &verb.name)?;
                all.current = Some(verb.name.clone());
                contexts::save(&path, &all)?;
            }
            Context::Rm(verb) => {
                known(&all, &verb.name)?;
                all.contexts.remove(&verb.name);
                if all.current.as_ref() == Some(&verb.name) {
                    all.current = None;
                }
                contexts::save(&path, &all)?;
            }
        }
        Ok(0)
    }
}

fn known(all: &Contexts, name: &str) -> Outcome<()> {
    match all.contexts.contains_key(name) {
        true => Ok(()),
        false => {
            let names: Vec<_> = all.contexts.keys().cloned().collect();
            let failure = Failure::new(format!("there is no context `{name}`"));
            Err(if names.is_empty() { failure } else { failure.hint(format!("there are: {}", names.join(", "))) })
        }
    }
}

impl Add {
    fn place(&self) -> Outcome<Place> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if self.name.is_empty() || self.name.len() > 63 || !self.name.chars().all(plain) {
            return Err(Failure::new("the name of a context has 1 to 63 letters, digits, `-`, `_`, `.`"));
        }
        let absolute = |path: &PathBuf| {
            std::path::absolute(path).map_err(|error| Failure::new(format!("{}: {error}", path.display())))
        };
        Ok(Place {
            url: self.url.clone(),
            key: if self.home.is_some() { None } else { self.key()? },
            ca: self.ca.as_ref().map(absolute).transpose()?,
            home: self.home.as_ref().map(absolute).transpose()?,
        })
    }

    fn key(&self) -> Outcome<Option<String>> {
        let Some(path) = &self.key_file else { return Ok(place::variable("PEPO_API_KEY")) };
        let mut text = String::new();
        let read = match path.to_str() {
            Some("-") => std::io::stdin().take(4096).read_to_string(&mut text),
            _ => std::fs::File::open(path).and_then(|file| file.take(4096).read_to_string(&mut text)),
        };
        read.map_err(|error| Failure::new(format!("--key-file {}: {error}", path.display())))?;
        match text.trim() {
            "" => Err(Failure::new(format!("--key-file {}: there is no key in it", path.display()))),
            key => Ok(Some(key.to_owned())),
        }
    }
}

impl Ls {
    fn show(&self, all: &Contexts) -> Outcome<()> {
        let shown: Vec<Shown<'_>> = all
            .contexts
            .iter()
            .map(|(name, place)| Shown {
                name,
                current: all.current.as_ref() == Some(name),
                url: place.url.as_deref(),
                home: place.home.as_ref().map(|home| home.display().to_string()),
                has_key: place.key.is_some(),
            })
            .collect();
        if self.json {
            return render::json(&shown);
        }
        if self.quiet {
            return shown.iter().try_for_each(|one| render::say(one.name));
        }
        let rows: Vec<Vec<String>> = shown
            .iter()
            .map(|one| {
                let place = one.url.map(str::to_owned).or_else(|| one.home.clone()).unwrap_or_default();
                let word = |is: bool, word: &str| if is { word.to_owned() } else { String::new() };
                vec![word(one.current, "*"), one.name.to_owned(), place, word(one.has_key, "yes")]
            })
            .collect();
        render::out(&render::table(&["", "NAME", "WHERE", "KEY"], &rows))
    }
}

//! Presets: names for what a network policy opens together.
//!
//! Three sources, the later replacing the earlier under the same name: those that come with the program (`presets.toml`:
//! code hosts, model providers), those of this machine's own package tools ([`machine`]: package registries, which stand
//! nowhere in this program), and the operator's, in the section `[presets]` of the configuration.
//!
//! An entry is written as on the command line: `api.example.com`, `*.example.com`, `api.example.com:443`, `192.0.2.0/24`.

pub mod machine;

use std::collections::BTreeMap;
use std::fmt;

use pepo_sandbox::net::policy::{NAME_PORTS, PORTS};
use pepo_sandbox::net::{Cidr, Pattern, Target};

/// Entries of one preset at most.
pub const ENTRIES: usize = 128;

/// The longest name of a preset.
const NAME_BYTES: usize = 32;

/// Presets that come with the program.
const BUILT_IN: &str = include_str!("presets.toml");

/// Why a text is no preset.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("preset {preset:?}: {reason}")]
pub struct Error {
    preset: String,
    reason: String,
}

impl Error {
    fn new(preset: &str, reason: impl Into<String>) -> Self {
        Error { preset: preset.chars().take(NAME_BYTES).collect(), reason: reason.into() }
    }
}

/// Where a preset comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The program.
    BuiltIn,
    /// This file of the machine.
    Machine(String),
    /// The configuration.
    Operator,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::BuiltIn => f.write_str("built in"),
            Source::Machine(file) => f.write_str(file),
            Source::Operator => f.write_str("configuration"),
        }
    }
}

/// One thing that a preset opens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// To whom.
    pub target: Target,
    /// On which ports; none are those of [`Target`]'s own default.
    pub ports: Vec<u16>,
}

impl Entry {
    /// Reads one.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if let Ok(cidr) = text.parse::<Cidr>() {
            return Ok(Entry { target: Target::Cidr(cidr), ports: Vec::new() });
        }
        if text.matches(':').count() > 1 {
            return Err(format!("`{text}`: IPv6 is not carried; give IPv4 or a name"));
        }
        let (target, port) = match text.rsplit_once(':') {
            Some((target, port)) => {
                let number = port.parse::<u16>().ok().filter(|port| *port > 0);
                (target, Some(number.ok_or_else(|| format!("`{port}` in `{text}` is no port"))?))
            }
            None => (text, None),
        };
        let ports = port.into_iter().collect();
        if target.contains('/') || target.parse::<std::net::Ipv4Addr>().is_ok() {
            let cidr = target.parse::<Cidr>().map_err(|error| error.to_string())?;
            return Ok(Entry { target: Target::Cidr(cidr), ports });
        }
        let pattern = Pattern::new(target).map_err(|error| error.to_string())?;
        Ok(Entry { target: Target::Domain(pattern), ports })
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.target)?;
        self.ports.iter().try_for_each(|port| write!(f, ":{port}"))
    }
}

/// What a name opens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preset {
    /// What.
    pub entries: Vec<Entry>,
    /// Who says so.
    pub source: Source,
}

/// All presets of this instance, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Presets(BTreeMap<String, Preset>);

impl Presets {
    /// Those of the program, of the machine and of the operator.
    ///
    /// # Errors
    /// The first of the operator's that is none.
    pub fn new(machine: BTreeMap<String, Preset>, operator: &BTreeMap<String, Vec<String>>) -> Result<Self, Error> {
        let mut presets = built_in()?;
        presets.extend(machine);
        for (name, texts) in operator {
            presets.insert(name.clone(), Preset { entries: entries(name, texts)?, source: Source::Operator });
        }
        Ok(Presets(presets))
    }

    /// The one of that name.
    pub fn get(&self, name: &str) -> Option<&Preset> {
        self.0.get(name)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Preset)> {
        self.0.iter().map(|(name, preset)| (name.as_str(), preset))
    }

    /// What to say of a name that none has: the nearest one, and for a package registry what to do.
    pub fn missing(&self, name: &str) -> String {
        if let Some(tool) = machine::tool(name) {
            return format!(
                "preset `{name}` is read from this machine's own configuration of {tool}, and there is none; \
                 configure {tool}, or write [presets] {name} = [\"registry.example.com\"] in pepo.toml"
            );
        }
        let nearest = self.0.keys().map(|known| (strsim::damerau_levenshtein(known, name), known)).min();
        let name = name.chars().take(NAME_BYTES).flat_map(char::escape_debug).collect::<String>();
        let hint = match nearest {
            Some((distance, known)) if distance <= 2 => format!("; did you mean `{known}`?"),
            _ => format!(
                "; there are {}",
                self.0.keys().map(|known| format!("`{known}`")).collect::<Vec<_>>().join(", ")
            ),
        };
        format!("there is no preset `{name}`{hint}")
    }
}

/// Whether that may be a preset's name: letters, digits and `-`, so that it is never taken for a host's.
pub fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=NAME_BYTES).contains(&name.len())
        && name.bytes().all(plain)
        && name.starts_with(|c: char| c.is_ascii_lowercase())
}

fn built_in() -> Result<BTreeMap<String, Preset>, Error> {
    let table: BTreeMap<String, Vec<String>> =
        toml::from_str(BUILT_IN).map_err(|error| Error::new("built in", error.to_string()))?;
    let preset = |(name, texts): (String, Vec<String>)| {
        let entries = entries(&name, &texts)?;
        Ok((name, Preset { entries, source: Source::BuiltIn }))
    };
    table.into_iter().map(preset).collect()
}

/// The entries of one preset. Ports of the same target are joined.
fn entries(name: &str, texts: &[String]) -> Result<Vec<Entry>, Error> {
    if !is_name(name) {
        return Err(Error::new(name, "a name has 1 to 32 characters a-z, 0-9 and -, a letter first"));
    }
    if texts.is_empty() || texts.len() > ENTRIES {
        return Err(Error::new(name, format!("{} entries; 1 to {ENTRIES} are possible", texts.len())));
    }
    let mut entries: Vec<Entry> = Vec::new();
    for text in texts {
        let entry = Entry::new(text).map_err(|reason| Error::new(name, reason))?;
        join(&mut entries, entry);
    }
    match entries.iter().find(|entry| entry.ports.len() > PORTS) {
        Some(entry) => Err(Error::new(name, format!("{} has more than {PORTS} ports", entry.target))),
        None => Ok(entries),
    }
}

/// Adds an entry, or its ports where the target is there.
fn join(entries: &mut Vec<Entry>, entry: Entry) {
    let Some(same) = entries.iter_mut().find(|one| one.target == entry.target) else {
        entries.push(entry);
        return;
    };
    let written = |entry: &Entry| match (&entry.target, entry.ports.is_empty()) {
        (Target::Domain(_), true) => NAME_PORTS.to_vec(),
        _ => entry.ports.clone(),
    };
    if same.ports == entry.ports {
        return;
    }
    // A range without ports is open on all of them.
    if matches!(entry.target, Target::Cidr(_)) && (same.ports.is_empty() || entry.ports.is_empty()) {
        same.ports.clear();
        return;
    }
    let mut ports = written(same);
    ports.extend(written(&entry));
    ports.sort_unstable();
    ports.dedup();
    same.ports = ports;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(entries: &[Entry]) -> Vec<String> {
        entries.iter().map(ToString::to_string).collect()
    }

    fn operator(name: &str, texts: &[&str]) -> BTreeMap<String, Vec<String>> {
        BTreeMap::from([(name.to_owned(), texts.iter().map(ToString::to_string).collect())])
    }

    #[test]
    fn what_comes_with_the_program_can_be_read_and_names_no_package_registry() {
        let presets = Presets::new(BTreeMap::new(), &BTreeMap::new()).expect("presets");
        for name in ["github", "gitlab", "anthropic", "openai"] {
            assert!(presets.get(name).is_some_and(|preset| !preset.entries.is_empty()), "{name}");
        }
        for name in machine::NAMES {
            assert_eq!(presets.get(name), None);
        }
        for (_, preset) in presets.iter() {
            // Names alone, on the ports of names: what a relay can hold to its name.
            assert!(
                preset.entries.iter().all(|entry| matches!(entry.target, Target::Domain(_)) && entry.ports.is_empty())
            );
        }
    }

    #[test]
    fn the_operator_has_the_last_word() {
        let ours = operator("github", &["git.example.com", "git.example.com:8443", "10.0.0.0/8:22", "192.0.2.1"]);
        let presets = Presets::new(BTreeMap::new(), &ours).expect("presets");
        let github = presets.get("github").expect("github");
        assert_eq!(texts(&github.entries), ["git.example.com:80:443:8443", "10.0.0.0/8:22", "192.0.2.1/32"]);
        assert_eq!(github.source, Source::Operator);
        for (name, texts, says) in [
            ("Git", &["a.example.com"][..], "a-z"),
            ("a.b", &["a.example.com"], "a-z"),
            ("git", &[], "0 entries"),
            ("git", &["*"], "star"),
            ("git", &["a.example.com:0"], "no port"),
            ("git", &["1.2.3.4/99"], "prefix"),
            ("git", &["::1"], "IPv6"),
        ] {
            let error = Presets::new(BTreeMap::new(), &operator(name, texts)).expect_err(name).to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_missing_one_says_what_to_do() {
        let presets = Presets::new(BTreeMap::new(), &BTreeMap::new()).expect("presets");
        assert!(presets.missing("gihub").ends_with("did you mean `github`?"));
        assert!(presets.missing("nothing-like-it").contains("`github`"));
        let pypi = presets.missing("pypi");
        assert!(pypi.contains("configuration of pip") && pypi.contains("[presets] pypi ="), "{pypi}");
    }
}

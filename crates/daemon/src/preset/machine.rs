//! Package registries as this machine's own tools know them. Pure over a tree of files.
//!
//! | preset | read from |
//! |---|---|
//! | `pypi` | `pip.conf`; where it names no index, the one that an installed pip has for its default |
//! | `npm` | `npmrc`; where it names no registry, the one that an installed npm has for its default |
//! | `crates` | cargo's configuration; indexes that cargo has used, with where they say downloads are |
//! | `debian` | the sources of apt |
//!
//! Read once, at the start, by the process that may read root's files. What cannot be read is passed over: the preset is
//! then not there, and says so when it is asked for.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use pepo_sandbox::net::policy::NAME_PORTS;
use pepo_sandbox::net::{Cidr, Pattern, Target};

use super::{ENTRIES, Entry, Preset, Source, join};

/// Presets that are read from the machine.
pub const NAMES: [&str; 4] = ["crates", "debian", "npm", "pypi"];

/// The longest file that is read, bytes.
const FILE: u64 = 1 << 20;

/// Entries of a directory that are looked at.
const FILES: usize = 256;

/// Whose configuration a preset is read from.
pub fn tool(preset: &str) -> Option<&'static str> {
    match preset {
        "crates" => Some("cargo"),
        "debian" => Some("apt"),
        "npm" => Some("npm"),
        "pypi" => Some("pip"),
        _ => None,
    }
}

/// Reads what there is below `root`; `homes` are home directories, below it too.
pub fn read(root: &Path, homes: &[PathBuf]) -> BTreeMap<String, Preset> {
    let tree = Tree { root, homes };
    let found = [("pypi", pip(&tree)), ("npm", npm(&tree)), ("crates", cargo(&tree)), ("debian", apt(&tree))];
    found.into_iter().filter_map(|(name, found)| Some((name.to_owned(), found.preset()?))).collect()
}

/// Where to look.
struct Tree<'a> {
    root: &'a Path,
    homes: &'a [PathBuf],
}

impl Tree<'_> {
    fn read(&self, path: &str) -> Option<String> {
        read_file(&self.root.join(path))
    }

    /// A file below every home.
    fn of_homes(&self, path: &str) -> Vec<(String, String)> {
        let inside = |home: &PathBuf| self.root.join(home.strip_prefix("/").unwrap_or(home)).join(path);
        let paths = self.homes.iter().map(inside);
        paths.filter_map(|path| Some((path.display().to_string(), read_file(&path)?))).collect()
    }

    fn all(&self, system: &[&str], home: &[&str]) -> Vec<(String, String)> {
        let mut all: Vec<_> = system.iter().filter_map(|path| Some((format!("/{path}"), self.read(path)?))).collect();
        all.extend(home.iter().flat_map(|path| self.of_homes(path)));
        all
    }

    /// Names in a directory, in order.
    fn list(&self, path: &Path) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.root.join(path)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.take(FILES).filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        names.sort();
        names
    }
}

fn read_file(path: &Path) -> Option<String> {
    let file = File::open(path).ok()?;
    // A pipe or a device in its place is not waited for.
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(FILE).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Entries, and the first file that gave one.
#[derive(Default)]
struct Found {
    entries: Vec<Entry>,
    source: Option<String>,
}

impl Found {
    /// Takes the host of an address, if it has one that is reached by TCP.
    fn take(&mut self, url: &str, source: &str) {
        if let Some(entry) = host(url) {
            self.add(entry, source);
        }
    }

    fn add(&mut self, entry: Entry, source: &str) {
        if self.entries.len() < ENTRIES {
            join(&mut self.entries, entry);
            self.source.get_or_insert_with(|| source.to_owned());
        }
    }

    fn preset(self) -> Option<Preset> {
        Some(Preset { entries: self.entries, source: Source::Machine(self.source?) })
    }
}

/// The host in `scheme://user@host:port/path`, for `http` and `https`, with what stands before them in some tools.
fn host(url: &str) -> Option<Entry> {
    let url = url.trim().trim_matches(['"', '\'']);
    let (scheme, rest) = url.split_once("://")?;
    let scheme = scheme.rsplit('+').next()?.to_ascii_lowercase();
    let usual = match scheme.as_str() {
        "https" => 443,
        "http" => 80,
        _ => return None,
    };
    let authority = rest.split(['/', '?', '#']).next()?;
    let place = authority.rsplit('@').next()?;
    let (name, port) = match place.rsplit_once(':') {
        Some((name, port)) => (name, port.parse::<u16>().ok().filter(|port| *port > 0)?),
        None => (place, usual),
    };
    // Over plain HTTP a registry commonly sends on to the same host's TLS.
    let ports = if NAME_PORTS.contains(&port) { Vec::new() } else { vec![port] };
    if let Ok(address) = name.parse::<Ipv4Addr>() {
        let ports = if ports.is_empty() { NAME_PORTS.to_vec() } else { ports };
        return Some(Entry { target: Target::Cidr(Cidr::containing(address, 32)), ports });
    }
    let name = pepo_sandbox::net::HostName::new(name).ok()?;
    Some(Entry { target: Target::Domain(Pattern::Exactly(name)), ports })
}

fn same_host(a: &str, b: &str) -> bool {
    host(a).is_some_and(|a| host(b).is_some_and(|b| a.target == b.target))
}

/// pip: the last `index-url` counts, every `extra-index-url` and `find-links` does.
fn pip(tree: &Tree<'_>) -> Found {
    let files = tree.all(&["etc/xdg/pip/pip.conf", "etc/pip.conf"], &[".pip/pip.conf", ".config/pip/pip.conf"]);
    let (mut index, mut found) = (None, Found::default());
    for (file, text) in &files {
        for (key, value) in ini(text) {
            match key.replace('_', "-").as_str() {
                "index-url" => index = Some((value, file)),
                "extra-index-url" | "find-links" => value.split_whitespace().for_each(|url| found.take(url, file)),
                _ => {}
            }
        }
    }
    let default = pip_default(tree);
    match (&index, &default) {
        (Some((url, file)), Some((own, files, _))) if same_host(url, own) => {
            found.take(url, file);
            found.take(files, file);
        }
        (Some((url, file)), _) => found.take(url, file),
        (None, Some((own, files, source))) => {
            found.take(own, source);
            found.take(files, source);
        }
        (None, None) => {}
    }
    found
}

/// What an installed pip has for its default: the index, where files are, and the file that says so.
fn pip_default(tree: &Tree<'_>) -> Option<(String, String, String)> {
    for base in ["usr/lib", "usr/local/lib"] {
        for python in tree.list(Path::new(base)).into_iter().filter(|name| name.starts_with("python3")) {
            for packages in ["dist-packages", "site-packages"] {
                let path = format!("{base}/{python}/{packages}/pip/_internal/models/index.py");
                let Some(text) = tree.read(&path) else { continue };
                let Some(at) = text.find("\nPyPI = PackageIndex(") else { continue };
                let mut quoted = text[at..].split('"').skip(1).step_by(2);
                if let (Some(index), Some(files)) = (quoted.next(), quoted.next()) {
                    return Some((index.to_owned(), format!("https://{files}"), format!("/{path}")));
                }
            }
        }
    }
    None
}

/// Keys and values of an INI file; a line that begins with a space goes on.
fn ini(text: &str) -> Vec<(String, String)> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';', '[']) {
            continue;
        }
        match (line.starts_with([' ', '\t']), trimmed.split_once(['=', ':'])) {
            (true, _) if !pairs.is_empty() => {
                if let Some((_, value)) = pairs.last_mut() {
                    value.push(' ');
                    value.push_str(trimmed);
                }
            }
            (_, Some((key, value))) => pairs.push((key.trim().to_ascii_lowercase(), value.trim().to_owned())),
            _ => {}
        }
    }
    pairs
}

/// npm: the last `registry` counts, and that of every scope.
fn npm(tree: &Tree<'_>) -> Found {
    let files = tree.all(&["etc/npmrc", "usr/etc/npmrc", "usr/local/etc/npmrc"], &[".npmrc"]);
    let (mut registry, mut found) = (None, Found::default());
    for (file, text) in &files {
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
            let Some((key, value)) = line.split_once('=') else { continue };
            match key.trim() {
                "registry" => registry = Some((value.trim().to_owned(), file.clone())),
                scope if scope.starts_with('@') && scope.ends_with(":registry") => found.take(value, file),
                _ => {}
            }
        }
    }
    if let Some((url, file)) = registry.or_else(|| npm_default(tree)) {
        found.take(&url, &file);
    }
    found
}

/// What an installed npm has for its default, and the file that says so.
fn npm_default(tree: &Tree<'_>) -> Option<(String, String)> {
    const BELOW: &str = "@npmcli/config/lib/definitions/definitions.js";
    for base in [
        "usr/lib/node_modules/npm/node_modules",
        "usr/local/lib/node_modules/npm/node_modules",
        "usr/share/nodejs/npm/node_modules",
        "usr/share/nodejs",
    ] {
        let path = format!("{base}/{BELOW}");
        let Some(text) = tree.read(&path) else { continue };
        let definition = text.find("define('registry'").or_else(|| text.find("Definition('registry'"));
        let url = definition.and_then(|at| text[at..].split(['\'', '"', '`']).find(|part| part.contains("://")));
        if let Some(url) = url {
            return Some((url.to_owned(), format!("/{path}")));
        }
    }
    None
}

/// cargo: the registries and sources of its configuration, and the indexes it has used.
fn cargo(tree: &Tree<'_>) -> Found {
    let system = ["etc/cargo/config.toml", "usr/local/cargo/config.toml", "usr/local/cargo/config"];
    let files = tree.all(&system, &[".cargo/config.toml", ".cargo/config"]);
    let mut found = Found::default();
    for (file, text) in &files {
        let Ok(table) = text.parse::<toml::Table>() else { continue };
        for section in ["source", "registries"] {
            let Some(toml::Value::Table(named)) = table.get(section) else { continue };
            for value in named.values().filter_map(toml::Value::as_table) {
                for key in ["registry", "index"] {
                    value.get(key).and_then(toml::Value::as_str).into_iter().for_each(|url| found.take(url, file));
                }
            }
        }
        let own = table.get("registry").and_then(toml::Value::as_table).and_then(|own| own.get("index"));
        own.and_then(toml::Value::as_str).into_iter().for_each(|url| found.take(url, file));
    }
    for home in tree.homes.iter().map(|home| home.join(".cargo")).chain([PathBuf::from("/usr/local/cargo")]) {
        let indexes = home.strip_prefix("/").unwrap_or(&home).join("registry/index");
        for name in tree.list(&indexes) {
            let source = Path::new("/").join(&indexes).join(&name).display().to_string();
            let Some(text) = tree.read(&format!("{}/{name}/config.json", indexes.display())) else { continue };
            // `<host>-<16 hex digits>`.
            if let Some((host, _)) = name.rsplit_once('-') {
                found.take(&format!("https://{host}"), &source);
            }
            if let Ok(config) = serde_json::from_str::<serde_json::Value>(&text) {
                for key in ["dl", "api"] {
                    config.get(key).and_then(|url| url.as_str()).into_iter().for_each(|url| found.take(url, &source));
                }
            }
        }
    }
    found
}

/// apt: every source that is on, of either form.
fn apt(tree: &Tree<'_>) -> Found {
    let mut found = Found::default();
    let mut lines = |path: &str, text: &str| {
        for line in text.lines().map(|line| line.split('#').next().unwrap_or_default()) {
            let mut words = line.split_whitespace();
            if !matches!(words.next(), Some("deb" | "deb-src")) {
                continue;
            }
            // `[arch=amd64 signed-by=…]` may stand before the address.
            let mut options = false;
            let url = words.find(|word| {
                options |= word.starts_with('[');
                let is_option = options;
                options &= !word.ends_with(']');
                !is_option
            });
            url.into_iter().for_each(|url| found.take(url, path));
        }
    };
    if let Some(text) = tree.read("etc/apt/sources.list") {
        lines("/etc/apt/sources.list", &text);
    }
    let directory = Path::new("etc/apt/sources.list.d");
    let names = tree.list(directory);
    let text = |name: &String| {
        let path = directory.join(name);
        Some((format!("/{}", path.display()), tree.read(path.to_str()?)?))
    };
    for (path, text) in names.iter().filter(|name| name.ends_with(".list")).filter_map(text) {
        lines(&path, &text);
    }
    for (path, text) in names.iter().filter(|name| name.ends_with(".sources")).filter_map(text) {
        for stanza in text.split("\n\n") {
            let stanza: Vec<_> = ini(stanza);
            let value = |key: &str| stanza.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str());
            if matches!(value("enabled"), Some("no" | "false" | "0")) {
                continue;
            }
            value("uris").unwrap_or_default().split_whitespace().for_each(|url| found.take(url, &path));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new(files: &[(&str, &str)]) -> Self {
            let root = tempfile::tempdir().expect("directory");
            for (path, text) in files {
                let path = root.path().join(path);
                std::fs::create_dir_all(path.parent().expect("parent")).expect("directories");
                std::fs::write(path, text).expect("write");
            }
            Machine(root)
        }

        fn preset(&self, name: &str) -> (Vec<String>, String) {
            let found = read(self.0.path(), &["/root".into()]);
            match found.get(name) {
                Some(preset) => {
                    let source = preset.source.to_string().replace(&self.0.path().display().to_string(), "");
                    (preset.entries.iter().map(ToString::to_string).collect(), source)
                }
                None => (Vec::new(), String::new()),
            }
        }
    }

    #[test]
    fn a_machine_without_tools_has_none() {
        assert!(read(Machine::new(&[]).0.path(), &["/root".into()]).is_empty());
    }

    #[test]
    fn pip_says_its_indexes() {
        let conf = "[global]\nindex-url = https://user:secret@pip.example.com:8443/simple\nextra_index_url =\n    https://one.example.com/simple\n    http://two.example.com\ntimeout = 9\n";
        let machine = Machine::new(&[("etc/pip.conf", conf)]);
        let (entries, source) = machine.preset("pypi");
        assert_eq!(entries, ["one.example.com", "two.example.com", "pip.example.com:8443"]);
        assert_eq!(source, "/etc/pip.conf");
        // A home's counts more; paths of this machine are no hosts.
        let home =
            "[install]\nfind-links = /opt/wheels https://wheels.example.com/x\nindex-url=https://home.example.com\n";
        let machine = Machine::new(&[("etc/pip.conf", conf), ("root/.config/pip/pip.conf", home)]);
        let (entries, _) = machine.preset("pypi");
        assert!(entries.contains(&"home.example.com".to_owned()) && entries.contains(&"wheels.example.com".to_owned()));
        assert!(!entries.contains(&"pip.example.com:8443".to_owned()));
    }

    #[test]
    fn an_installed_tool_says_its_default() {
        let index = "class PackageIndex:\n    pass\n\n\nPyPI = PackageIndex(\"https://index.example.org/\", file_storage_domain=\"files.example.org\")\nTestPyPI = PackageIndex(\n    \"https://test.example.org/\", file_storage_domain=\"t.example.org\"\n)\n";
        let pip = ("usr/lib/python3/dist-packages/pip/_internal/models/index.py", index);
        assert_eq!(Machine::new(&[pip]).preset("pypi").0, ["index.example.org", "files.example.org"]);
        // The default named aloud has the same files.
        let named = ("etc/pip.conf", "[global]\nindex-url=https://index.example.org/simple\n");
        assert_eq!(Machine::new(&[pip, named]).preset("pypi").0, ["index.example.org", "files.example.org"]);
        let mirror = ("etc/pip.conf", "[global]\nindex-url=https://mirror.example.com/simple\n");
        assert_eq!(Machine::new(&[pip, mirror]).preset("pypi").0, ["mirror.example.com"]);
        let npm = (
            "usr/share/nodejs/npm/node_modules/@npmcli/config/lib/definitions/definitions.js",
            "  'x': new Definition('x', { default: 'https://no.example.org/' }),\n  registry: new Definition('registry', {\n    default: 'https://npm.example.org/',\n",
        );
        assert_eq!(Machine::new(&[npm]).preset("npm").0, ["npm.example.org"]);
    }

    #[test]
    fn npm_says_its_registries() {
        let machine = Machine::new(&[
            (
                "etc/npmrc",
                "; comment\nregistry=https://one.example.com/\n@scope:registry = https://scope.example.com/npm/\n",
            ),
            ("root/.npmrc", "registry=https://home.example.com\n//home.example.com/:_authToken=secret\n"),
        ]);
        let (entries, _) = machine.preset("npm");
        assert_eq!(entries, ["scope.example.com", "home.example.com"]);
    }

    #[test]
    fn cargo_says_its_indexes_and_where_downloads_are() {
        let config = "[source.crates-io]\nreplace-with = \"mirror\"\n[source.mirror]\nregistry = \"sparse+https://mirror.example.com/index/\"\n[registries.own]\nindex = \"https://own.example.com/git\"\n[net]\nretry = 3\n";
        let machine = Machine::new(&[
            ("root/.cargo/config.toml", config),
            (
                "root/.cargo/registry/index/index.example.org-1949cf8c6b5b557f/config.json",
                "{\"dl\": \"https://static.example.org/crates\", \"api\": \"https://example.org\"}",
            ),
        ]);
        let (entries, _) = machine.preset("crates");
        assert_eq!(
            entries,
            ["mirror.example.com", "own.example.com", "index.example.org", "static.example.org", "example.org"]
        );
    }

    #[test]
    fn apt_says_its_sources() {
        let machine = Machine::new(&[
            (
                "etc/apt/sources.list",
                "# deb http://no.example.com x main\ndeb [arch=amd64 signed-by=/x y=z] http://deb.example.com/debian x main # y\ndeb cdrom:[x]/ y main\ndeb-src https://src.example.com:8080 x main\ndeb http://192.0.2.9/debian x main\n",
            ),
            ("etc/apt/sources.list.d/one.list", "deb [ trusted=yes ] https://list.example.com/x y z\n"),
            (
                "etc/apt/sources.list.d/two.sources",
                "Types: deb\nURIs: http://deb.example.com/debian\n https://second.example.com\nSuites: x\n\nEnabled: no\nTypes: deb\nURIs: https://off.example.com\n",
            ),
            ("etc/apt/sources.list.d/old.list.disabled", "deb https://disabled.example.com x y\n"),
        ]);
        let (entries, source) = machine.preset("debian");
        assert_eq!(
            entries,
            [
                "deb.example.com",
                "src.example.com:8080",
                "192.0.2.9/32:80:443",
                "list.example.com",
                "second.example.com"
            ]
        );
        assert_eq!(source, "/etc/apt/sources.list");
    }

    proptest! {
        #[test]
        fn any_files_are_read(text in "[a-z=:/.@\\[\\]#;\" \n-]{0,300}") {
            let machine = Machine::new(&[
                ("etc/pip.conf", &text), ("etc/npmrc", &text), ("etc/apt/sources.list", &text),
                ("etc/apt/sources.list.d/a.sources", &text), ("root/.cargo/config.toml", &text),
            ]);
            for preset in read(machine.0.path(), &["/root".into()]).values() {
                prop_assert!(!preset.entries.is_empty() && preset.entries.len() <= ENTRIES);
            }
        }
    }
}

//! Recipes: what goes into an Image, as a file says it.
//!
//! A recipe builds on another (`from`) or on a suite of Debian. [`resolve`] follows `from` through the recipes that Pepo
//! ships and returns one flat [`Flat`], whose canonical JSON is what the digest of the inputs is made of.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use pepo_api::RecipeFile;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// The recipes that Pepo ships, by name.
pub const SHIPPED: [(&str, &str); 3] = [
    ("base", include_str!("../../../../images/base.toml")),
    ("base-dev", include_str!("../../../../images/base-dev.toml")),
    ("browser", include_str!("../../../../images/examples/browser.toml")),
];

/// The longest recipe, bytes.
const TEXT: usize = 1 << 20;

/// All files of a recipe together, bytes. They travel in one message to the builder.
const FILES: usize = 32 << 20;

/// How many recipes may build on each other.
const DEPTH: usize = 8;

/// What is wrong with a recipe.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no shipped recipe of that name.
    #[error("there is no recipe {name:?}{}", hint(meant))]
    Unknown {
        /// The name.
        name: String,
        /// The nearest name that is one.
        meant: Option<String>,
    },
    /// The text is not a recipe.
    #[error("recipe{}: {reason}{}", .line.map(|line| format!(" line {line}")).unwrap_or_default(), hint(meant))]
    Text {
        /// The line, from 1.
        line: Option<usize>,
        /// What is wrong.
        reason: String,
        /// The nearest key that is known.
        meant: Option<String>,
    },
    /// A value is not one that can be used.
    #[error("recipe {recipe:?}: {field}: {reason}")]
    Value {
        /// The recipe's name.
        recipe: String,
        /// Which key.
        field: String,
        /// What is wrong.
        reason: String,
    },
}

fn hint(meant: &Option<String>) -> String {
    meant.as_ref().map(|name| format!(" (did you mean {name:?}?)")).unwrap_or_default()
}

/// A recipe file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    name: String,
    from: Option<String>,
    suite: Option<String>,
    kernel: Option<String>,
    #[serde(default)]
    packages: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default, rename = "file")]
    files: Vec<TextFile>,
    run: Option<String>,
}

/// Every key of a recipe, for the hint at a wrong one.
const KEYS: [&str; 8] = ["name", "from", "suite", "kernel", "packages", "env", "file", "run"];
const FILE_KEYS: [&str; 5] = ["path", "text", "source", "mode", "owner"];

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct TextFile {
    path: String,
    text: Option<String>,
    source: Option<String>,
    mode: Option<String>,
    owner: Option<String>,
}

/// A recipe with everything it builds on, checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flat {
    /// Its name.
    pub name: String,
    /// The suite of Debian.
    pub suite: String,
    /// The package whose dependency is the kernel.
    pub kernel: String,
    /// Packages, sorted.
    pub packages: BTreeSet<String>,
    /// Environment of every command, as `/etc/environment` has it.
    pub env: BTreeMap<String, String>,
    /// What each of the recipes adds to the packages, the one all others build on first.
    pub layers: Vec<Layer>,
}

/// Files, and what is run when they are there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Files, in the order in which they are written.
    pub files: Vec<FlatFile>,
    /// A script for `/bin/sh -e`, run as the Image's root.
    pub run: Option<String>,
}

/// One file of a recipe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlatFile {
    /// Where it lies in the Image.
    pub path: String,
    /// Its bytes.
    pub base64: String,
    /// Its permission bits.
    pub mode: u32,
    /// Its user, who is in the Image's own list.
    pub owner: String,
}

impl Flat {
    /// SHA-256 over everything in it, as hex.
    pub fn digest(&self) -> String {
        let text = serde_json::to_vec(self).unwrap_or_default();
        super::hex(&Sha256::digest(&text))
    }
}

/// The recipe that Pepo ships under that name.
///
/// # Errors
/// [`Error::Unknown`].
pub fn shipped(name: &str) -> Result<&'static str, Error> {
    SHIPPED.iter().find(|(shipped, _)| *shipped == name).map(|(_, text)| *text).ok_or_else(|| Error::Unknown {
        name: name.to_owned(),
        meant: nearest(name, SHIPPED.iter().map(|(shipped, _)| *shipped)),
    })
}

/// The known word that `word` may have been meant to be.
pub(super) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<String> {
    known
        .map(|one| (strsim::damerau_levenshtein(word, one), one))
        .filter(|(distance, one)| *distance <= 1.max(one.len() / 3))
        .min()
        .map(|(_, one)| one.to_owned())
}

/// Reads a recipe with everything it builds on, adds packages, and looks up the files it takes from beside it.
///
/// # Errors
/// Any [`Error`].
pub fn resolve(text: &str, more: &[String], beside: &BTreeMap<String, RecipeFile>) -> Result<Flat, Error> {
    let mut chain = vec![read(text)?];
    while let Some(from) = chain.last().and_then(|recipe| recipe.from.clone()) {
        if chain.len() == DEPTH {
            return Err(value(&chain[0].name, "from", format!("more than {DEPTH} recipes build on each other")));
        }
        chain.push(read(shipped(&from)?)?);
    }
    let name = chain[0].name.clone();
    let no_files = BTreeMap::new();
    let mut flat: Option<Flat> = None;
    let mut bytes = 0;
    for (depth, recipe) in chain.iter().enumerate().rev() {
        let flat = flat.get_or_insert_with(|| Flat {
            name: name.clone(),
            suite: String::new(),
            kernel: "linux-image-cloud-amd64".to_owned(),
            packages: BTreeSet::new(),
            env: BTreeMap::new(),
            layers: Vec::new(),
        });
        flat.suite = recipe.suite.clone().unwrap_or_else(|| flat.suite.clone());
        flat.kernel = recipe.kernel.clone().unwrap_or_else(|| flat.kernel.clone());
        flat.packages.extend(recipe.packages.iter().cloned());
        flat.env.extend(recipe.env.clone());
        // Only the recipe that was handed in has files beside it: shipped ones are whole.
        let beside = if depth == 0 { beside } else { &no_files };
        let mut layer = Layer { files: Vec::new(), run: recipe.run.clone() };
        for one in &recipe.files {
            let file = file(&recipe.name, one, beside)?;
            bytes += file.base64.len();
            layer.files.push(file);
        }
        if layer != Layer::default() {
            flat.layers.push(layer);
        }
    }
    let mut flat = flat.ok_or_else(|| value(&name, "name", "empty".to_owned()))?;
    flat.packages.extend(more.iter().cloned());
    if bytes > FILES {
        return Err(value(&name, "file", format!("all files together are over {} MiB", FILES >> 20)));
    }
    check(&flat)?;
    Ok(flat)
}

fn value(recipe: &str, field: impl Into<String>, reason: impl Into<String>) -> Error {
    Error::Value { recipe: recipe.to_owned(), field: field.into(), reason: reason.into() }
}

fn read(text: &str) -> Result<Text, Error> {
    if text.len() > TEXT {
        let reason = format!("longer than {} MiB", TEXT >> 20);
        return Err(Error::Text { line: None, reason, meant: None });
    }
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let line = error.span().map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        let reason = error.message().to_owned();
        // serde says "unknown field `pakages`, expected one of …".
        let unknown = reason.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
        let meant = unknown.and_then(|word| nearest(word, KEYS.into_iter().chain(FILE_KEYS)));
        Error::Text { line, reason, meant }
    })
}

fn file(recipe: &str, from: &TextFile, beside: &BTreeMap<String, RecipeFile>) -> Result<FlatFile, Error> {
    let field = format!("file {:?}", from.path);
    let wrong = |reason: String| value(recipe, field.clone(), reason);
    let parts: Vec<&str> = from.path.strip_prefix('/').unwrap_or_default().split('/').collect();
    if from.path.len() > 1024 || from.path.contains('\0') || parts.iter().any(|part| matches!(*part, "" | "." | "..")) {
        return Err(wrong("path must be absolute, without empty, . or .. parts".to_owned()));
    }
    let (base64, executable) = match (&from.text, &from.source) {
        (Some(text), None) => (BASE64.encode(text), false),
        (None, Some(source)) => {
            let given = beside.get(source).ok_or_else(|| wrong(format!("source {source:?} was not sent along")))?;
            BASE64.decode(&given.base64).map_err(|error| wrong(format!("source {source:?}: {error}")))?;
            (given.base64.clone(), given.executable)
        }
        _ => return Err(wrong("needs either text or source".to_owned())),
    };
    let mode = match &from.mode {
        None => 0o644 | if executable { 0o111 } else { 0 },
        Some(mode) => u32::from_str_radix(mode, 8)
            .ok()
            .filter(|bits| *bits <= 0o7777)
            .ok_or_else(|| wrong(format!("mode {mode:?} is not octal, like \"0644\"")))?,
    };
    let owner = from.owner.clone().unwrap_or_else(|| "root".to_owned());
    if !word(&owner, "_-") {
        return Err(wrong(format!("owner {owner:?} is not a user's name")));
    }
    Ok(FlatFile { path: from.path.clone(), base64, mode, owner })
}

fn check(flat: &Flat) -> Result<(), Error> {
    let wrong = |field: &str, reason: String| Err(value(&flat.name, field, reason));
    super::check_name(&flat.name).map_err(|reason| value(&flat.name, "name", reason))?;
    if flat.suite.is_empty() {
        return wrong("suite", "needed where there is no from".to_owned());
    }
    if !word(&flat.suite, "-") {
        return wrong("suite", format!("{:?} is not a suite, like \"trixie\"", flat.suite));
    }
    for package in flat.packages.iter().chain([&flat.kernel]) {
        // Names only: they become words of a command line and of apt's own language of patterns.
        // One that ends in a dash would be taken out instead of put in.
        let plain = package.starts_with(|c: char| c.is_ascii_alphanumeric()) && !package.ends_with('-');
        if package.len() > 128 || !plain || !word(package, "+-.:") {
            return wrong("packages", format!("{package:?} is not a package's name"));
        }
    }
    for (name, text) in &flat.env {
        let plain = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && word(name, "_");
        if !plain {
            return wrong("env", format!("{name:?} is not a variable's name"));
        }
        if text.contains(['\n', '\0', '"']) {
            return wrong("env", format!("{name} may not contain a line end, a NUL or a double quote"));
        }
    }
    Ok(())
}

fn word(text: &str, also: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || also.contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(text: &str) -> Result<Flat, Error> {
        resolve(text, &[], &BTreeMap::new())
    }

    #[test]
    fn what_is_shipped_can_be_built() {
        for (name, text) in SHIPPED {
            let recipe = flat(text).expect(name);
            assert_eq!(recipe.name, name);
            assert!(recipe.packages.contains("python3"), "{name}");
            assert!(recipe.env["PATH"].starts_with("/opt/venv/bin:"), "{name}");
        }
        assert!(flat(shipped("base-dev").expect("there")).expect("good").packages.contains("build-essential"));
        assert!(flat(shipped("browser").expect("there")).expect("good").packages.contains("chromium"));
    }

    #[test]
    fn a_wrong_key_is_named_with_the_nearest() {
        let error = flat("name = \"x\"\nsuite = \"trixie\"\npakages = []\n").expect_err("refused");
        let text = error.to_string();
        assert!(text.contains("line 3") && text.contains("pakages") && text.contains("\"packages\""), "{text}");
        let error = flat("name=\"x\"\nsuite=\"trixie\"\n[[file]]\npath=\"/a\"\ntxt=\"\"\n").expect_err("refused");
        assert!(error.to_string().contains("did you mean \"text\""), "{error}");
        let error = flat("name = \"x\"\nfrom = \"bas\"").expect_err("refused");
        assert_eq!(error.to_string(), "there is no recipe \"bas\" (did you mean \"base\"?)");
    }

    #[test]
    fn a_recipe_adds_to_what_it_builds_on() {
        let base = flat(shipped("base").expect("base")).expect("good");
        let more = "name='mine'\nfrom='base'\npackages=['htop']\nrun='true'\n[env]\nTZ='Europe/Zurich'\nX='1'\n";
        let mine = resolve(more, &["tree".to_owned()], &BTreeMap::new()).expect("good");
        assert!(mine.packages.is_superset(&base.packages));
        assert!(mine.packages.contains("htop") && mine.packages.contains("tree"));
        assert_eq!((mine.env["TZ"].as_str(), mine.env["X"].as_str()), ("Europe/Zurich", "1"));
        assert_eq!(mine.layers.len(), base.layers.len() + 1);
        assert_eq!(mine.suite, base.suite);
    }

    #[test]
    fn the_digest_follows_the_content_and_nothing_else() {
        let one = flat("name='x'\nsuite='trixie'\npackages=['a','b']").expect("good");
        let same = flat("packages = [\n 'b', 'a', 'a' ]\nsuite=\"trixie\"\nname=\"x\" # text").expect("good");
        assert_eq!(one.digest(), same.digest());
        for other in ["packages=['a','b','c']", "packages=['a','b']\nrun='true'", "packages=['a','b']\n[env]\nA='1'"] {
            let other = flat(&format!("name='x'\nsuite='trixie'\n{other}")).expect("good");
            assert_ne!(one.digest(), other.digest());
        }
    }

    #[test]
    fn values_that_would_be_options_or_patterns_are_refused() {
        for package in ["-o", "apt-", "a b", "?installed", "~n.*", "a/sid", "", "a=1"] {
            let recipe = format!("name='x'\nsuite='trixie'\npackages=['{package}']");
            assert!(flat(&recipe).is_err(), "{package:?} was taken");
        }
        for bad in ["suite='../x'", "suite='a b'", "suite=''"] {
            assert!(flat(&format!("name='x'\n{bad}")).is_err(), "{bad} was taken");
        }
        for bad in ["/", "/a//b", "relative", "/a/../b", "/./a"] {
            let recipe = format!("name='x'\nsuite='trixie'\n[[file]]\npath='{bad}'\ntext=''");
            assert!(flat(&recipe).is_err(), "{bad} was taken");
        }
        for bad in ["mode='9'", "mode='77777'", "owner='a b'", "source='x'"] {
            let recipe = format!("name='x'\nsuite='trixie'\n[[file]]\npath='/a'\n{bad}\n");
            assert!(flat(&recipe).is_err(), "{bad} was taken");
        }
        assert!(flat("name='../x'\nsuite='trixie'").is_err());
    }

    #[test]
    fn files_come_from_the_text_or_from_beside_it() {
        let text = "name='x'\nfrom='base'\n[[file]]\npath='/opt/tool'\nsource='bin/tool'\nowner='agent'\n";
        let missing = flat(text).expect_err("refused");
        assert!(missing.to_string().contains("bin/tool"), "{missing}");
        let given = RecipeFile { base64: BASE64.encode("hello"), executable: true };
        let beside = BTreeMap::from([("bin/tool".to_owned(), given)]);
        let recipe = resolve(text, &[], &beside).expect("good");
        let tool = recipe.layers.last().and_then(|layer| layer.files.last()).expect("the file");
        assert_eq!((tool.path.as_str(), tool.mode, tool.owner.as_str()), ("/opt/tool", 0o755, "agent"));
    }
}

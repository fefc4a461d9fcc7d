//! `pepo image …`. A recipe and its files are read here and sent: no request names a path of the host.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Args, Subcommand};
use pepo_api::client::ClientError;
use pepo_api::{BuildEvent, BuildImage, Image as Record, RecipeFile, RemovedImages};

use crate::fail::{Failure, Notes, Outcome};
use crate::interrupt::Interrupts;
use crate::place::Place;
use crate::{escape, launch, render};

/// What a request may carry as JSON.
const MOST: u64 = 700 << 10;

#[derive(Debug, Subcommand)]
pub enum Image {
    /// Build an Image from Debian's packages
    Build(Build),
    /// List Images
    Ls(Ls),
    /// Show one Image
    Show(One),
    /// Remove a name, and the Image with its last one
    Rm(One),
    /// Remove Images that no name points to and nobody uses
    Gc(Gc),
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples: pepo image build base\n          pepo image build base --package ffmpeg --name media\n          pepo image build ./recipe.toml"
)]
pub struct Build {
    /// The name that shall point to it; the recipe's own where absent
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// A package more; may be given several times
    #[arg(long = "package", value_name = "NAME")]
    packages: Vec<String>,
    /// Print one JSON event a line
    #[arg(long)]
    json: bool,
    /// Print the Image's id alone
    #[arg(short, long)]
    quiet: bool,
    /// A recipe that comes with Pepo (base, base-dev), or a recipe file
    #[arg(value_name = "RECIPE", default_value = "base")]
    recipe: String,
}

#[derive(Debug, Args)]
pub struct Ls {
    /// Print ids alone
    #[arg(short, long)]
    quiet: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct One {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The Image, by name or id
    #[arg(value_name = "IMAGE")]
    image: String,
}

#[derive(Debug, Args)]
pub struct Gc {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Image {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let mut interrupts = Interrupts::new()?;
        let notes = match self {
            Image::Build(Build { quiet: true, .. }) => Notes::Off,
            _ => Notes::On,
        };
        // Said before a daemon is started for it.
        let request = match self {
            Image::Build(build) => Some(build.request()?),
            _ => None,
        };
        let working = async {
            let client = launch::ensure(place, "image …", notes).await?;
            match self {
                Image::Build(build) => {
                    let events = client.image_build(&request.unwrap_or_default()).await?;
                    build.follow(events).await
                }
                Image::Ls(verb) => {
                    let images = client.image_list().await?.items;
                    if verb.json {
                        render::json(&images)?;
                    } else if verb.quiet {
                        images.iter().try_for_each(|image| render::say(&image.id.to_string()))?;
                    } else {
                        render::out(&table(&images, jiff::Timestamp::now()))?;
                    }
                    Ok(())
                }
                Image::Show(verb) => {
                    let image = client.image_show(&verb.image).await?;
                    if verb.json { render::json(&image) } else { render::out(&details(&image)) }
                }
                Image::Rm(verb) => removed(&client.image_remove(&verb.image).await?, verb.json),
                Image::Gc(verb) => removed(&client.image_gc().await?, verb.json),
            }
        };
        match interrupts.unless(working).await {
            Ok(done) => done.map(|()| 0),
            // Closing the connection gave the build up; the daemon leaves nothing of it.
            Err(caught) => Ok(caught.exit_code()),
        }
    }
}

fn removed(removed: &RemovedImages, json: bool) -> Outcome<()> {
    if json {
        return render::json(removed);
    }
    for image in &removed.removed {
        render::say(&image.id.to_string())?;
    }
    render::say(&format!("{} are free again", render::size(removed.freed_bytes)))
}

fn table(images: &[Record], now: jiff::Timestamp) -> String {
    let rows: Vec<_> = images
        .iter()
        .map(|i| {
            vec![
                if i.names.is_empty() { "-".into() } else { i.names.join(",") },
                i.id.to_string(),
                render::size(i.size_bytes),
                i.kernel.clone(),
                i.packages.to_string(),
                i.in_use.to_string(),
                render::ago(i.created_at, now),
            ]
        })
        .collect();
    render::table(&["NAME", "ID", "SIZE", "KERNEL", "PACKAGES", "IN USE", "CREATED"], &rows)
}

fn details(image: &Record) -> String {
    render::fields(&[
        ("id", image.id.to_string()),
        ("names", image.names.join(" ")),
        ("digest", format!("sha256:{}", image.digest)),
        ("size", render::size(image.size_bytes)),
        ("kernel", image.kernel.clone()),
        ("packages", image.packages.to_string()),
        ("in use by", format!("{} Sessions", image.in_use)),
        ("created", render::time(image.created_at)),
    ])
}

impl Build {
    fn request(&self) -> Outcome<BuildImage> {
        let mut request =
            BuildImage { name: self.name.clone(), packages: self.packages.clone(), ..BuildImage::default() };
        let is_file = self.recipe.contains('/') || self.recipe.ends_with(".toml");
        if !is_file {
            request.recipe = Some(self.recipe.clone());
            return Ok(request);
        }
        let path = Path::new(&self.recipe);
        let text =
            std::fs::read_to_string(path).map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
        let base = path.parent().unwrap_or(Path::new("."));
        request.files = files(&text, base).map_err(|failure| failure.doing(path.display()))?;
        request.recipe_toml = Some(text);
        Ok(request)
    }

    async fn follow(&self, mut events: pepo_api::client::EventStream<BuildEvent>) -> Outcome<()> {
        let mut screen = Screen::new(self.json || self.quiet);
        while let Some(event) = events.next().await? {
            if self.json {
                render::json_line(&event)?;
            }
            match event {
                BuildEvent::Done { image, cached } => {
                    screen.done();
                    return match (self.json, self.quiet) {
                        (true, _) => Ok(()),
                        (_, true) => render::say(&image.id.to_string()),
                        _ => {
                            let how = if cached { "was there already" } else { "is built" };
                            let names = image.names.join(", ");
                            render::say(&format!(
                                "{names} {how}: {}, {}, kernel {}, {} packages, in {:.1} s",
                                image.id,
                                render::size(image.size_bytes),
                                image.kernel,
                                image.packages,
                                screen.begun.elapsed().as_secs_f64()
                            ))
                        }
                    };
                }
                BuildEvent::Failed { error } => {
                    screen.failed();
                    return Err(ClientError::Api(Box::new(error)).into());
                }
                other => screen.event(&other),
            }
        }
        Err(ClientError::Lost("the build".into()).into())
    }
}

/// The files that a recipe's `[[file]]` entries name, by their source as written; relative to the recipe.
fn files(recipe: &str, base: &Path) -> Outcome<BTreeMap<String, RecipeFile>> {
    let table: toml::Table =
        recipe.parse().map_err(|error: toml::de::Error| Failure::new(error.to_string().trim_end()))?;
    let (mut files, mut total) = (BTreeMap::new(), 0);
    for entry in table.get("file").and_then(toml::Value::as_array).into_iter().flatten() {
        // What else is wrong with an entry is the daemon's to say.
        let Some(source) = entry.get("source").and_then(toml::Value::as_str) else { continue };
        let path: PathBuf = base.join(source);
        let told = |error: std::io::Error| Failure::new(format!("file `{source}`: {error}"));
        let meta = std::fs::metadata(&path).map_err(told)?;
        if !meta.is_file() {
            return Err(Failure::new(format!("file `{source}` is no file")));
        }
        total += meta.len();
        if total > MOST {
            return Err(Failure::new(format!("the recipe's files have more than {} together", render::size(MOST)))
                .hint("put large things into a package, or copy them into the Session with `pepo cp`"));
        }
        let bytes = std::fs::read(&path).map_err(told)?;
        let executable = std::os::unix::fs::PermissionsExt::mode(&meta.permissions()) & 0o111 != 0;
        files.insert(source.to_owned(), RecipeFile::of(&bytes, executable));
    }
    Ok(files)
}

/// How a build goes, on standard error: one line a step with its time, and on a terminal what it does just now.
struct Screen {
    begun: Instant,
    step: Option<(String, Instant)>,
    /// A line that the next one replaces stands on the terminal.
    standing: bool,
    terminal: bool,
    silent: bool,
    /// The last lines of tools, which explain a failure.
    log: std::collections::VecDeque<String>,
}

impl Screen {
    fn new(silent: bool) -> Self {
        Screen {
            begun: Instant::now(),
            step: None,
            standing: false,
            terminal: std::io::stderr().is_terminal(),
            silent,
            log: std::collections::VecDeque::new(),
        }
    }

    fn write(&self, text: &str) {
        if !self.silent {
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
    }

    fn event(&mut self, event: &BuildEvent) {
        match event {
            BuildEvent::Step { number, of, name } => {
                self.done();
                let title = format!("[{number}/{of}] {}", escape::line(name));
                if self.terminal {
                    self.write(&title);
                    self.standing = true;
                }
                self.step = Some((title, Instant::now()));
            }
            BuildEvent::Progress { percent } => self.now(&format!("{percent} %")),
            BuildEvent::Log { line } => {
                if self.log.len() >= 20 {
                    self.log.pop_front();
                }
                let line = escape::line(&render::short(line, 300));
                self.now(&line);
                self.log.push_back(line);
            }
            BuildEvent::Done { .. } | BuildEvent::Failed { .. } => {}
        }
    }

    fn now(&mut self, text: &str) {
        if self.terminal
            && let Some((title, _)) = &self.step
        {
            // One line, whatever the width: what wraps could not be taken back.
            let room = usize::from(crate::terminal::size().cols).saturating_sub(title.chars().count() + 3);
            let text = if room < 8 { String::new() } else { render::short(text, room) };
            self.write(&format!("\r\x1b[K{title}  {text}"));
            self.standing = true;
        }
    }

    fn done(&mut self) {
        let clear = if std::mem::take(&mut self.standing) { "\r\x1b[K" } else { "" };
        if let Some((title, since)) = self.step.take() {
            self.write(&format!("{clear}{title}  {:.1} s\n", since.elapsed().as_secs_f64()));
        }
    }

    fn failed(&mut self) {
        self.done();
        for line in std::mem::take(&mut self.log) {
            let _ = writeln!(std::io::stderr(), "  {line}");
        }
    }
}

impl Drop for Screen {
    /// Given up in the middle: what is printed next begins on a line of its own.
    fn drop(&mut self) {
        if self.standing {
            self.write("\n");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipes_files_come_along() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.sh"), "#!/bin/sh\n").unwrap();
        let recipe = "name = 'x'\n[[file]]\nsource = 'a.sh'\npath = '/usr/local/bin/a'\n";
        let found = files(recipe, dir.path()).unwrap();
        assert_eq!(found["a.sh"], RecipeFile::of(b"#!/bin/sh\n", false));
        let missing = files("[[file]]\nsource = 'b'\n", dir.path()).unwrap_err();
        assert!(missing.message().starts_with("file `b`: "), "{missing:?}");
        assert!(files("[[file", dir.path()).is_err());
    }
}

//! The builder's work: from a flat recipe to the files of an Image. Runs as `pepod build`, inside the room that crate
//! `sandbox` made, as the root of a user namespace and nobody on the host.
//!
//! ```text
//! find packages ─▶ fetch ─▶ install ─▶ set up ─▶ kernel ─▶ file system ─▶ manifest
//!      mmdebstrap, with apt's signature checks        dpkg-deb   mkfs.erofs
//! ```
//! The same packages and the same recipe give the same bytes: whatever a build would leave of its time and place (logs,
//! caches, dates) is removed or set to the time of the newest file that came out of a package.
//!
//! What it tells goes to standard output, one JSON [`Told`] a line; pepod reads it as it reads anything a stranger wrote.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant, SystemTime};

use base64::Engine as _;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::manifest::{self, FileEntry, Manifest};
use super::recipe::{Flat, FlatFile};
use super::{initramfs, kernel, tree};

/// The longest line that is told, bytes.
pub const LINE: usize = 2048;

/// The longest input, bytes.
const INPUT: u64 = 64 << 20;

/// Programs of the host that are used, and the package of Debian that each is in.
const PROGRAMS: [(&str, &str); 5] = [
    ("mmdebstrap", "mmdebstrap"),
    ("mkfs.erofs", "erofs-utils"),
    ("dpkg-deb", "dpkg"),
    ("apt-get", "apt"),
    ("awk", "mawk"),
];

/// Where the keys of Debian's archive are on every host that has the package.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Of the file system: one constant, so that the same content gives the same bytes.
const UUID: &str = "70657030-0000-4000-8000-000000000001";

/// What pepod writes for the builder.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// What to build.
    pub recipe: Flat,
    /// The digest of the inputs, kept in the manifest.
    pub inputs: String,
    /// Where packages come from; the tool's own choice where absent.
    pub mirror: Option<String>,
}

/// One line of what the builder tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "told", rename_all = "snake_case", deny_unknown_fields)]
pub enum Told {
    /// A step began.
    Step {
        /// Which, from 1 to [`STEPS`].
        number: u32,
        /// What it does.
        name: String,
    },
    /// How far the present step is, in percent.
    Progress {
        /// 0..=100.
        percent: u8,
    },
    /// A line from a tool.
    Log {
        /// At most [`LINE`] bytes.
        line: String,
    },
    /// The last line of one that failed.
    Failed {
        /// Why.
        failure: Failure,
    },
}

/// How many steps a build has inside the builder.
pub const STEPS: u32 = 6;

/// Why a build failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "failure", rename_all = "snake_case", deny_unknown_fields)]
pub enum Failure {
    /// A program or file of the host is missing.
    #[error("{what} is missing on this host: install the package {package}")]
    Missing {
        /// Which.
        what: String,
        /// What brings it.
        package: String,
    },
    /// A package is not in the suite.
    #[error("there is no package {package:?} in {suite}")]
    NoPackage {
        /// Its name.
        package: String,
        /// Where it was looked for.
        suite: String,
    },
    /// The packages cannot be reached.
    #[error("packages cannot be fetched: {reason}")]
    Fetch {
        /// What apt said.
        reason: String,
    },
    /// What is unpacked is larger than its room.
    #[error("the packages take more than the {room_mib} MiB that a build may unpack")]
    Room {
        /// Size of the room.
        room_mib: u64,
    },
    /// The disk has too little room for the Image.
    #[error("too little disk space: the image needs {needed_mib} MiB, {available_mib} MiB are free")]
    Disk {
        /// What the Image takes.
        needed_mib: u64,
        /// What there is.
        available_mib: u64,
    },
    /// A tool failed.
    #[error("{tool} failed: {reason}")]
    Tool {
        /// Which.
        tool: String,
        /// The last it said.
        reason: String,
    },
    /// The kernel's package is not as expected.
    #[error("{reason}")]
    Kernel {
        /// What is wrong.
        reason: String,
    },
    /// Anything else: an operation and why it did not work.
    #[error("{step}: {reason}")]
    Step {
        /// What was tried.
        step: String,
        /// Why not.
        reason: String,
    },
}

fn at(step: impl Into<String>) -> impl FnOnce(io::Error) -> Failure {
    let step = step.into();
    move |error| Failure::Step { step, reason: error.to_string() }
}

/// `pepod build`: enters the room, builds, tells.
pub fn main(arguments: &[String]) -> ExitCode {
    let inside = match pepo_sandbox::builder::enter(arguments) {
        Ok(inside) => inside,
        Err(code) => return code,
    };
    let mut teller = Teller { out: io::stdout(), percent: None };
    let work = Work { room: inside.room, out: inside.output };
    match work.build(&inside.input, &mut teller) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            teller.tell(&Told::Failed { failure });
            ExitCode::FAILURE
        }
    }
}

/// Writes lines. A pipe that nobody reads any more is noticed by being killed.
struct Teller<W> {
    out: W,
    percent: Option<u8>,
}

impl<W: Write> Teller<W> {
    fn tell(&mut self, told: &Told) {
        if let Ok(mut line) = serde_json::to_vec(told) {
            line.push(b'\n');
            let _ = self.out.write_all(&line).and_then(|()| self.out.flush());
        }
    }

    fn step(&mut self, number: u32, name: &str) {
        self.percent = None;
        self.tell(&Told::Step { number, name: name.to_owned() });
    }

    fn progress(&mut self, done: u64, of: u64) {
        let percent = u8::try_from((done * 100).checked_div(of).unwrap_or(0).min(100)).unwrap_or(100);
        if self.percent.is_none_or(|told| told < percent) {
            self.percent = Some(percent);
            self.tell(&Told::Progress { percent });
        }
    }

    fn log(&mut self, line: &str) {
        let mut end = line.len().min(LINE);
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        self.tell(&Told::Log { line: line[..end].to_owned() });
    }
}

struct Work {
    room: PathBuf,
    out: PathBuf,
}

impl Work {
    fn build<W: Write>(&self, input: &Path, teller: &mut Teller<W>) -> Result<(), Failure> {
        let mut text = String::new();
        let file = File::open(input).map_err(at("open the input"))?;
        file.take(INPUT).read_to_string(&mut text).map_err(at("read the input"))?;
        let input: Input = serde_json::from_str(&text).map_err(|error| at("read the input")(error.into()))?;
        let tools = tools()?;
        let started = SystemTime::now();
        self.stage(&input.recipe)?;
        self.install(&input, teller)?;
        let tree = self.room.join("root");
        let packages = manifest::packages(&self.read("packages")?, &self.read("hashes")?)
            .map_err(|reason| Failure::Step { step: "list the packages".to_owned(), reason })?;

        teller.step(5, "Unpack the kernel");
        let release = self.kernel(teller)?;

        teller.step(6, "Write the file system");
        tree::tidy(&tree).map_err(at("tidy up the tree"))?;
        let epoch = tree::settle_times(&tree, started).map_err(at("settle the times of files"))?;
        self.file_system(&tree, epoch, teller)?;
        teller.progress(90, 100);

        let mut files = BTreeMap::new();
        for name in manifest::FILES {
            files.insert(name.to_owned(), FileEntry::of(&self.out.join(name)).map_err(at(format!("read {name}")))?);
        }
        let manifest = Manifest {
            format: manifest::FORMAT,
            inputs: input.inputs,
            recipe: input.recipe,
            packages,
            tools,
            kernel: release,
            epoch,
            files,
        };
        let text = manifest.to_bytes().map_err(|error| at("write the manifest")(error))?;
        fs::write(self.out.join(manifest::MANIFEST), text).map_err(at("write the manifest"))?;
        teller.progress(100, 100);
        Ok(())
    }

    fn read(&self, name: &str) -> Result<String, Failure> {
        fs::read_to_string(self.room.join(name)).map_err(at(format!("read the list of {name}")))
    }

    /// Puts what the recipe adds to its packages where the hook finds it: files, scripts, and the script that uses them.
    fn stage(&self, recipe: &Flat) -> Result<(), Failure> {
        let stage = self.room.join("stage");
        let write = |name: &str, bytes: &[u8]| {
            fs::write(stage.join(name), bytes).map_err(at(format!("write {name} for the recipe")))
        };
        fs::create_dir(&stage).map_err(at("make a directory for the recipe"))?;
        let mut script = String::from("set -e\ncd /\n");
        let environment = environment(&recipe.env);
        write("environment", environment.as_bytes())?;
        script.push_str(&installed(STAGED, "environment", "/etc/environment", 0o644, "root"));
        let mut number = 0;
        for layer in &recipe.layers {
            for FlatFile { path, base64, mode, owner } in &layer.files {
                number += 1;
                let name = format!("file-{number}");
                let bytes = base64::engine::general_purpose::STANDARD.decode(base64);
                write(&name, &bytes.map_err(|error| at(format!("decode {path}"))(io::Error::other(error)))?)?;
                script.push_str(&installed(STAGED, &name, path, *mode, owner));
            }
            if let Some(run) = &layer.run {
                number += 1;
                let name = format!("run-{number}");
                write(&name, run.as_bytes())?;
                script.push_str(&format!("/bin/sh -e {STAGED}/{name}\n"));
            }
        }
        write("all", script.as_bytes())?;
        // Outside the chroot, where the package lists still are: which packages there are, what their files' hashes are,
        // and the kernel's, which is unpacked but never installed.
        let hook = format!(
            r#"set -e
root=$1
mkdir -p "$root{STAGED}"
cp -r "{stage}/." "$root{STAGED}"
chroot "$root" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive /bin/sh -e {STAGED}/all
rm -rf "$root{STAGED}"
cd "{room}"
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
chroot "$root" dpkg-query -W -f '${{Package}} ${{Version}} ${{Architecture}}\n' > packages
apt-cache show --no-all-versions {kernel} > kernel.txt
k=$(awk '/^Depends:/ {{ for (i = 2; i <= NF; i++) if ($i ~ /^linux-image-/) {{ sub(/,$/, "", $i); print $i; exit }} }}' kernel.txt)
[ -n "$k" ] || k={kernel}
mkdir kernel
cd kernel
apt-get -q download "$k"
cd ..
apt-cache show --no-all-versions $(awk '{{ print $1 }}' packages) "$k" | awk '/^(Package|Version|Architecture|SHA256): / {{ print }}' > hashes
"#,
            stage = stage.display(),
            room = self.room.display(),
            kernel = recipe.kernel,
        );
        fs::write(self.room.join("hook"), hook).map_err(at("write the hook"))
    }

    /// Runs mmdebstrap.
    fn install<W: Write>(&self, input: &Input, teller: &mut Teller<W>) -> Result<(), Failure> {
        let recipe = &input.recipe;
        let packages: Vec<&str> = recipe.packages.iter().map(String::as_str).collect();
        let mut command = Command::new("mmdebstrap");
        command.args(["--mode=root", "--variant=apt", "--format=directory", "--verbose", "--arch=amd64"]);
        for option in [
            // Said although they are defaults: no configuration of this host may weaken them.
            "Acquire::AllowInsecureRepositories \"false\"",
            "Acquire::AllowWeakRepositories \"false\"",
            "Acquire::AllowDowngradeToInsecureRepositories \"false\"",
            "APT::Get::AllowUnauthenticated \"false\"",
            "Acquire::Languages \"none\"",
            "Acquire::Retries \"3\"",
            "APT::Install-Recommends \"false\"",
        ] {
            command.arg(format!("--aptopt={option}"));
        }
        for proxy in proxies() {
            command.arg(format!("--aptopt={proxy}"));
        }
        for option in [
            // The room is in memory or thrown away: nothing is gained by waiting for a disk.
            "force-unsafe-io",
            "path-exclude=/usr/share/man/*",
            "path-exclude=/usr/share/info/*",
            "path-exclude=/usr/share/locale/*",
            "path-exclude=/usr/share/doc/*",
            "path-exclude=/usr/share/lintian/*",
            "path-include=/usr/share/doc/*/copyright",
        ] {
            command.arg(format!("--dpkgopt={option}"));
        }
        if !packages.is_empty() {
            command.arg(format!("--include={}", packages.join(",")));
        }
        let hook = self.room.join("hook");
        command.arg(format!("--customize-hook=/bin/sh {} \"$1\"", hook.display()));
        command.arg(&recipe.suite).arg(self.room.join("root"));
        command.args(input.mirror.iter().flat_map(|mirror| sources(mirror, &recipe.suite)));
        let mut progress = Progress::default();
        let (status, tail) = run(&mut command, |line| progress.line(line, teller))?;
        if status {
            return Ok(());
        }
        let text = tail.join("\n");
        if text.contains("No space left on device") {
            return Err(Failure::Room { room_mib: size_of_room(&self.room) >> 20 });
        }
        if let Some(package) = between(&text, "Unable to locate package ", "\n") {
            let (package, suite) = (package.to_owned(), recipe.suite.clone());
            return Err(Failure::NoPackage { package, suite });
        }
        if let Some(line) =
            tail.iter().find(|line| line.starts_with("E: Failed to fetch") || line.contains(" InRelease"))
        {
            return Err(Failure::Fetch { reason: line.trim_start_matches("E: ").to_owned() });
        }
        // The first says what went wrong, those after it who gave up because of it.
        let reason = tail.iter().find(|line| line.starts_with("E: ")).or(tail.last()).cloned().unwrap_or_default();
        Err(Failure::Tool { tool: "mmdebstrap".to_owned(), reason })
    }

    /// Takes kernel and modules out of the package that the hook fetched. Returns the release.
    fn kernel<W: Write>(&self, teller: &mut Teller<W>) -> Result<String, Failure> {
        let wrong = |reason: String| Failure::Kernel { reason };
        let directory = self.room.join("kernel");
        let there = fs::read_dir(&directory).map_err(at("list the kernel's package"))?;
        let mut packages: Vec<PathBuf> = there.flatten().map(|entry| entry.path()).collect();
        packages.retain(|path| path.extension().is_some_and(|extension| extension == "deb"));
        let [package] = &packages[..] else {
            return Err(wrong("the kernel's package did not arrive".to_owned()));
        };
        let tree = self.room.join("kernel-tree");
        let (unpacked, tail) = run(Command::new("dpkg-deb").arg("-x").arg(package).arg(&tree), |_| {})?;
        if !unpacked {
            return Err(Failure::Tool { tool: "dpkg-deb".to_owned(), reason: tail.join("; ") });
        }
        teller.progress(50, 100);
        let modules = ["lib/modules", "usr/lib/modules"].map(|path| tree.join(path));
        let modules = modules.iter().find(|path| path.is_dir());
        let release = modules.and_then(|path| fs::read_dir(path).ok()?.next()?.ok()).map(|entry| entry.path());
        let release = release.ok_or_else(|| wrong("the kernel's package has no modules".to_owned()))?;
        let name = release.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let image = tree.join("boot").join(format!("vmlinuz-{name}"));
        let image = fs::read(&image).map_err(at(format!("read {}", image.display())))?;
        let elf = kernel::unpack(&image).map_err(|error| wrong(error.to_string()))?;
        self.needs(elf.len() as u64)?;
        fs::write(self.out.join(manifest::KERNEL), elf).map_err(at("write the kernel"))?;
        let modules = kernel::modules(&release, &kernel::WANTED).map_err(|error| wrong(error.to_string()))?;
        let archive = initramfs::modules_archive(&modules);
        fs::write(self.out.join(manifest::MODULES), archive).map_err(at("write the modules"))?;
        fs::remove_dir_all(&tree).map_err(at("remove the kernel's tree"))?;
        Ok(name)
    }

    fn needs(&self, bytes: u64) -> Result<(), Failure> {
        let room = rustix::fs::statvfs(&self.out).map_err(|error| at("look at the disk")(error.into()))?;
        let available = room.f_bavail * room.f_frsize;
        // Beside it, something is left for the store.
        let needed = bytes + (64 << 20);
        if available < needed {
            return Err(Failure::Disk { needed_mib: needed.div_ceil(1 << 20), available_mib: available >> 20 });
        }
        Ok(())
    }

    /// Not compressed: an emulated processor loads Python 12 %, Node.js 25 % faster from it than from LZ4, for 1.7 times
    /// the disk, and there is one file for any number of Sandboxes.
    fn file_system<W: Write>(&self, tree: &Path, epoch: u64, teller: &mut Teller<W>) -> Result<(), Failure> {
        let bytes = tree::size(tree).map_err(at("measure the tree"))?;
        self.needs(bytes)?;
        teller.progress(20, 100);
        let image = self.out.join(manifest::ROOT);
        let mut command = Command::new("mkfs.erofs");
        command.args(["--quiet", "-d0", "-U", UUID]).arg(&image).arg(tree);
        let (made, tail) = run(&mut command, |_| {})?;
        if !made {
            let text = tail.join("; ");
            if text.contains("No space left") {
                return self.needs(bytes * 2).and(Err(Failure::Tool { tool: "mkfs.erofs".to_owned(), reason: text }));
            }
            return Err(Failure::Tool { tool: "mkfs.erofs".to_owned(), reason: text });
        }
        tree::set_build_time(&image, epoch).map_err(at("set the time of the file system"))
    }
}

/// Lines of a list of sources: what a mirror has of a suite. By itself, mmdebstrap adds security and other updates only
/// where it chooses the mirror.
fn sources(mirror: &str, suite: &str) -> Vec<String> {
    let mut lines = vec![format!("deb {mirror} {suite} main")];
    if !matches!(suite, "sid" | "unstable" | "experimental") {
        lines.push(format!("deb {mirror} {suite}-updates main"));
        lines.push(format!("deb {mirror}-security {suite}-security main"));
    }
    lines
}

/// Inside the chroot, while the recipe is carried out.
const STAGED: &str = "/tmp/.pepo";

fn installed(stage: &str, name: &str, path: &str, mode: u32, owner: &str) -> String {
    let path = quoted(path);
    format!("install -D -m {mode:04o} -o {owner} -g \"$(id -gn {owner})\" {stage}/{name} {path}\n")
}

/// As one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// `/etc/environment`: values in double quotes, which the recipe's may not contain.
fn environment(env: &BTreeMap<String, String>) -> String {
    env.iter().map(|(name, value)| format!("{name}=\"{value}\"\n")).collect()
}

/// What a version is of, and which: part of the manifest.
fn tools() -> Result<BTreeMap<String, String>, Failure> {
    for (program, package) in PROGRAMS {
        let path = std::env::var_os("PATH").unwrap_or_default();
        if !std::env::split_paths(&path).any(|directory| directory.join(program).is_file()) {
            return Err(Failure::Missing { what: program.to_owned(), package: package.to_owned() });
        }
    }
    if !Path::new(KEYS).exists() {
        return Err(Failure::Missing { what: KEYS.to_owned(), package: "debian-archive-keyring".to_owned() });
    }
    let mut versions = BTreeMap::new();
    for (program, argument) in [("mmdebstrap", "--version"), ("mkfs.erofs", "-V")] {
        let mut first = None;
        run(Command::new(program).arg(argument), |line| {
            first.get_or_insert_with(|| line.to_owned());
        })?;
        versions.insert(program.to_owned(), first.unwrap_or_default());
    }
    Ok(versions)
}

/// Proxies that this host's apt is configured to use, as options.
fn proxies() -> Vec<String> {
    let mut found = Vec::new();
    let listed = run(Command::new("apt-config").arg("dump"), |line| {
        let key = line.split(' ').next().unwrap_or_default();
        let lower = key.to_ascii_lowercase();
        if lower.starts_with("acquire::http") && lower.contains("::proxy") && !line.ends_with("\"\";") {
            found.push(line.trim_end_matches(';').to_owned());
        }
    });
    if listed.is_err() { Vec::new() } else { found }
}

/// Turns what mmdebstrap and apt print into steps and percents.
///
/// apt says twice how many packages it will install: those that every system has, fetched in a step of their own and
/// unpacked in 2 of 16 seconds, and all others, fetched, unpacked and set up in one go.
#[derive(Default)]
struct Progress {
    part: Part,
    packages: u64,
    counted: u64,
    last: Option<Instant>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Part {
    #[default]
    Finding,
    Fetching,
    Essential,
    Others,
    Recipe,
}

impl Progress {
    fn begin<W: Write>(&mut self, part: Part, step: Option<(u32, &str)>, teller: &mut Teller<W>) {
        self.part = part;
        self.counted = 0;
        if let Some((number, name)) = step {
            teller.step(number, name);
        }
    }

    fn line<W: Write>(&mut self, line: &str, teller: &mut Teller<W>) {
        if let Some(packages) = between(line, "upgraded, ", " newly installed") {
            self.packages = packages.parse().unwrap_or(0);
        }
        let fetched = line.starts_with("Get:");
        let settled = line.starts_with("Unpacking ") || line.starts_with("Setting up ");
        match (line, self.part) {
            _ if line.starts_with("I: running apt-get update") => {
                self.begin(Part::Finding, Some((1, "Find packages")), teller);
            }
            _ if line.starts_with("I: downloading packages") => {
                self.begin(Part::Fetching, Some((2, "Fetch packages")), teller);
            }
            _ if line.starts_with("I: extracting archives") => {
                self.begin(Part::Essential, Some((3, "Install packages")), teller);
            }
            _ if line.starts_with("I: installing remaining") => self.begin(Part::Others, None, teller),
            _ if line.starts_with("I: running --customize-hook") => {
                self.begin(Part::Recipe, Some((4, "Carry out the recipe")), teller);
            }
            (_, Part::Fetching) if fetched => {
                self.counted += 1;
                teller.progress(self.counted, self.packages);
            }
            (_, Part::Essential) if settled => {
                self.counted += 1;
                teller.progress(self.counted, 8 * 2 * self.packages);
            }
            (_, Part::Others) if settled || fetched => {
                self.counted += 1;
                let all = 3 * self.packages;
                teller.progress(all + 7 * self.counted.min(all), 8 * all);
            }
            _ => {}
        }
        // Thousands of lines come in seconds: what matters comes always, of the rest enough to see that it goes on.
        let matters = line.starts_with("E: ") || line.starts_with("I: ") || line.starts_with("Err:");
        if matters || self.last.is_none_or(|last| last.elapsed() > Duration::from_millis(100)) {
            self.last = Some(Instant::now());
            teller.log(line);
        }
    }
}

/// Runs a program, its two outputs as one, a line at a time. Whether it succeeded, and the last lines.
fn run(command: &mut Command, mut each: impl FnMut(&str)) -> Result<(bool, Vec<String>), Failure> {
    let program = command.get_program().to_string_lossy().into_owned();
    let step = || format!("run {program}");
    let (reader, writer) = io::pipe().map_err(at(step()))?;
    let copy = writer.try_clone().map_err(at(step()))?;
    let child = command.stdin(Stdio::null()).stdout(writer).stderr(copy).spawn();
    // The command holds the pipe's writing ends: without letting go of them, the end of the output never comes.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = child.map_err(at(step()))?;
    let mut tail = std::collections::VecDeque::new();
    let mut lines = BufReader::new(reader);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        // A line without an end is cut: what follows is a line of its own.
        let got = (&mut lines).take(64 * 1024).read_until(b'\n', &mut bytes).map_err(at(step()))?;
        if got == 0 {
            break;
        }
        let text = String::from_utf8_lossy(&bytes);
        // apt draws its progress with carriage returns.
        let line = text.trim_end().rsplit('\r').next().unwrap_or_default();
        if line.is_empty() {
            continue;
        }
        each(line);
        if tail.len() == 40 {
            tail.pop_front();
        }
        tail.push_back(line.chars().take(1000).collect::<String>());
    }
    let status = child.wait().map_err(at(step()))?;
    Ok((status.success(), tail.into()))
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    text.split_once(start)?.1.split(end).next()
}

fn size_of_room(room: &Path) -> u64 {
    rustix::fs::statvfs(room).map(|room| room.f_blocks * room.f_frsize).unwrap_or(0)
}

/// SHA-256 of a file and its length.
pub(super) fn hash(path: &Path) -> io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut length = 0;
    loop {
        let got = file.read(&mut buffer)?;
        if got == 0 {
            return Ok((length, super::hex(&digest.finalize())));
        }
        digest.update(&buffer[..got]);
        length += got as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn teller() -> Teller<Vec<u8>> {
        Teller { out: Vec::new(), percent: None }
    }

    fn told(teller: &Teller<Vec<u8>>) -> Vec<Told> {
        String::from_utf8_lossy(&teller.out).lines().map(|line| serde_json::from_str(line).expect("json")).collect()
    }

    #[test]
    fn the_tools_output_becomes_steps_and_percents() {
        let mut teller = teller();
        let mut progress = Progress::default();
        for line in [
            "I: running apt-get update...",
            "Get:1 x trixie InRelease",
            "I: downloading packages with apt...",
            "0 upgraded, 2 newly installed, 0 to remove and 0 not upgraded.",
            "Get:1 x a",
            "Get:2 x b",
            "I: extracting archives...",
            "Unpacking a (1) ...",
            "Setting up a (1) ...",
            "Unpacking b (1) ...",
            "Setting up b (1) ...",
            "I: installing remaining packages inside the chroot...",
            "0 upgraded, 1 newly installed, 0 to remove and 0 not upgraded.",
            "Get:1 x c",
            "Unpacking c (1) ...",
            "Setting up c (1) ...",
            "Setting up something that nobody announced",
            "I: running --customize-hook in shell",
        ] {
            progress.line(line, &mut teller);
        }
        let told = told(&teller);
        let steps: Vec<u32> = told
            .iter()
            .filter_map(|one| if let Told::Step { number, .. } = one { Some(*number) } else { None })
            .collect();
        assert_eq!(steps, [1, 2, 3, 4]);
        let percents: Vec<u8> = told
            .iter()
            .filter_map(|one| if let Told::Progress { percent } = one { Some(*percent) } else { None })
            .collect();
        assert_eq!(percents, [50, 100, 3, 6, 9, 12, 41, 70, 100]);
    }

    #[test]
    fn lines_are_cut_between_characters() {
        let mut teller = teller();
        teller.log(&"ü".repeat(LINE));
        assert!(matches!(&told(&teller)[..], [Told::Log { line }] if line.len() <= LINE && line.len() > LINE - 2));
    }

    #[test]
    fn both_outputs_of_a_program_are_seen_and_its_end() {
        let mut lines = Vec::new();
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two >&2; printf 'a\\rb\\n'; printf three; exit 3"]);
        let (status, tail) = run(&mut command, |line| lines.push(line.to_owned())).expect("ran");
        assert!(!status);
        assert_eq!(lines, ["one", "two", "b", "three"]);
        assert_eq!(tail, lines);
        assert!(run(&mut Command::new("/nonexistent/program"), |_| {}).is_err());
    }

    #[test]
    fn a_mirror_has_updates_beside_it() {
        assert_eq!(sources("http://m/debian", "sid"), ["deb http://m/debian sid main"]);
        let lines = sources("http://m/debian", "trixie");
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[2], "deb http://m/debian-security trixie-security main");
    }

    #[test]
    fn a_shell_sees_one_word() {
        assert_eq!(quoted("/a b/it's"), "'/a b/it'\\''s'");
        let line = installed("/s", "f", "/x", 0o640, "agent");
        assert_eq!(line, "install -D -m 0640 -o agent -g \"$(id -gn agent)\" /s/f '/x'\n");
        let env = BTreeMap::from([("A".to_owned(), "b c".to_owned())]);
        assert_eq!(environment(&env), "A=\"b c\"\n");
    }
}

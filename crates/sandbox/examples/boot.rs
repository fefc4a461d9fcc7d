//! Boots a kernel in the real jail again and again and prints how long each boot took: for finding out what a word on a
//! command line costs, and whether any boot hangs.
//!
//! ```text
//! cargo run -p pepo-sandbox --example boot -- KERNEL INITRD ROOT --until TEXT [--boots N] [--state DIR] [WORD…]
//! ```
//! `--memory MIB`, `--cpus N` and `--throttle BYTES` (a second, for each disk) change the machine. A boot is done when TEXT is on the console. Further words go to the kernel's command line. Needs root.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};

use pepo_sandbox::vmm::qmp::Qmp;
use pepo_sandbox::vmm::{Boot, Descriptors, Throttle, closure, probe, qemu, vsock};
use pepo_sandbox::{jail, sys};

const PATIENCE: Duration = Duration::from_secs(60);
const VMM_UID: u32 = 0x7000_0001;
const VSOCK_UID: u32 = 0x7000_0002;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut text = error.to_string();
            let mut source = error.source();
            while let Some(cause) = source {
                text.push_str(&format!(": {cause}"));
                source = cause.source();
            }
            let _ = writeln!(io::stderr(), "boot: {text}");
            ExitCode::from(jail::EXIT_NOT_JAILED)
        }
    }
}

struct Plan {
    boot: Boot,
    root: PathBuf,
    state: PathBuf,
    until: String,
    boots: usize,
}

fn run() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let mut words = Vec::new();
    let (mut until, mut boots, mut state) = (None, 1, PathBuf::from("/tmp/pepo-boot"));
    let (mut memory_mib, mut vcpus, mut throttle) = (256, 1, None);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "jail" => {
                value()?;
                let fd = value()?.parse()?;
                let spec = jail::read_spec(sys::inherited(fd).ok_or("no specification")?)?;
                match jail::enter(&spec)? {}
            }
            "--until" => until = Some(value()?),
            "--boots" => boots = value()?.parse()?,
            "--state" => state = value()?.into(),
            "--memory" => memory_mib = value()?.parse()?,
            "--cpus" => vcpus = value()?.parse()?,
            "--throttle" => throttle = Some(Throttle { bytes: value()?.parse()?, operations: 10_000 }),
            _ => words.push(argument),
        }
    }
    let [kernel, initrd, root, words @ ..] = &words[..] else { return Err("KERNEL INITRD ROOT".into()) };
    let boot = Boot {
        vcpus,
        memory_mib,
        kernel: fs::canonicalize(kernel)?,
        initrd: fs::canonicalize(initrd)?,
        arguments: words.to_vec(),
        scratch_size: 1 << 30,
        throttle,
        uid: VMM_UID,
        interface: None,
    };
    let plan = Plan { boot, root: root.into(), state, until: until.ok_or("--until TEXT")?, boots };
    writeln!(io::stdout(), "{}", probe::hardware())?;
    fs::create_dir_all(&plan.state)?;
    let programs = closure::prepare(&plan.state, &closure::Sources::default())?;
    sys::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS)?;
    let mut times = Vec::new();
    for index in 0..plan.boots {
        let took = once(&plan, &programs)?;
        if plan.boots > 1 {
            writeln!(io::stdout(), "{index:4} {:.3}", took.as_secs_f64())?;
        }
        times.push(took);
    }
    times.sort();
    let at =
        |part: usize| times.get((times.len() * part / 100).min(times.len() - 1)).map_or(0.0, Duration::as_secs_f64);
    writeln!(io::stdout(), "{} boots, none hung: p50 {:.3} s, p95 {:.3} s", times.len(), at(50), at(95))?;
    Ok(())
}

fn once(plan: &Plan, programs: &closure::Programs) -> Outcome<Duration> {
    let own = Path::new("/proc/self/exe");
    let directory = plan.state.join("run");
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir(&directory)?;
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o700))?;
    std::os::unix::fs::chown(&directory, Some(VSOCK_UID), Some(VSOCK_UID))?;
    let scratch_path = plan.state.join("scratch");
    let scratch = File::options().read(true).write(true).create(true).truncate(true).open(&scratch_path)?;
    scratch.set_len(plan.boot.scratch_size)?;
    let system = File::open(&plan.root)?;
    let log = File::options().append(true).create(true).open(plan.state.join("log"))?;

    let started = Instant::now();
    let spec = vsock::command(&programs.vsock_device, directory.clone(), VSOCK_UID, log.as_raw_fd());
    let mut device = Reaped(jail::launch(own, &spec)?);
    let connection = loop {
        match UnixStream::connect(directory.join(vsock::DEVICE_SOCKET)) {
            Ok(connection) => break connection,
            Err(_) if started.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(2)),
            Err(error) => return Err(format!("stream device: {error}; see {}/log", plan.state.display()).into()),
        }
        if let Some(status) = device.0.try_wait()? {
            return Err(format!("stream device ended: {status}; see {}/log", plan.state.display()).into());
        }
    };
    let (console, their_console) = UnixStream::pair()?;
    let (control, their_control) = UnixStream::pair()?;
    let descriptors = Descriptors {
        system: system.as_raw_fd(),
        scratch: scratch.as_raw_fd(),
        console: their_console.as_raw_fd(),
        control: their_control.as_raw_fd(),
        vsock: connection.as_raw_fd(),
        tap: None,
        log: log.as_raw_fd(),
        gate: None,
    };
    let mut vmm = Reaped(jail::launch(own, &qemu::command(&programs.qemu, &plan.boot, &descriptors))?);
    drop((their_console, their_control, connection));
    let mut control = Qmp::greet(control, PATIENCE)?;
    let took = wait_for(console, &plan.until, started)?;
    control.quit(PATIENCE)?;
    vmm.0.wait()?;
    fs::remove_file(&scratch_path)?;
    fs::remove_dir_all(&directory)?;
    Ok(took)
}

fn wait_for(mut console: UnixStream, text: &str, started: Instant) -> Outcome<Duration> {
    let mut seen = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        if seen.windows(text.len()).any(|window| window == text.as_bytes()) {
            if std::env::var_os("PEPO_BOOT_SHOW").is_some() {
                io::stderr().write_all(&seen)?;
            }
            return Ok(started.elapsed());
        }
        let left = PATIENCE.saturating_sub(started.elapsed());
        console.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match console.read(&mut chunk) {
            Ok(count) if count > 0 => seen.extend(chunk.iter().take(count)),
            other => {
                io::stderr().write_all(&seen)?;
                return Err(format!("the boot did not end well ({other:?}); its console is above").into());
            }
        }
    }
}

/// A child that does not outlive this program's interest in it.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

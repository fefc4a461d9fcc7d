//! Real microVMs, as root: the whole line, every way it can be cut, and what is left on the host afterwards.
//!
//! Needs root and `PEPO_BOOT`, a directory with `vmlinux`, `initramfs` and `rootfs.erofs`; without them every test fails
//! and says so. This program is its own pepod: it has the modes `keeper` and `jail`, and each test runs *lives* of an
//! instance (`life NAME`), which fork into the privileged side and a side without rights, like the real one. What is left is
//! read from `/proc`, the cgroup file systems and the directories, not from the engine.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, clippy::print_stderr)]

mod host_is_clean;
mod lives;
mod official;
mod tests;

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match &args[1..] {
        ["keeper", "--fd", fd] => {
            let socket = pepo_sandbox::sys::inherited(fd.parse().unwrap()).expect("an order");
            ExitCode::from(pepo_sandbox::keeper::run(socket))
        }
        ["jail", "--fd", fd] => {
            let spec = pepo_sandbox::sys::inherited(fd.parse().unwrap()).expect("a specification");
            let Err(error) = pepo_sandbox::jail::read_spec(spec).and_then(|spec| pepo_sandbox::jail::enter(&spec));
            eprintln!("{error}: {:?}", std::error::Error::source(&error).map(ToString::to_string));
            ExitCode::from(pepo_sandbox::jail::EXIT_NOT_JAILED)
        }
        ["life", name, state, rest @ ..] => lives::live(name, state.as_ref(), rest),
        // What `cargo test` and nextest ask of a test program.
        rest if rest.contains(&"--list") => {
            // `make test --no-microvm` says so by an empty variable; nothing else leaves them out.
            let left_out = std::env::var_os("PEPO_E2E").is_some_and(|value| value.is_empty());
            if !left_out {
                let listed = tests::all().into_iter().filter(|test| test.can_run != rest.contains(&"--ignored"));
                listed.for_each(|test| println!("{}: test", test.name));
            }
            ExitCode::SUCCESS
        }
        rest => {
            let wanted: Vec<_> = rest.iter().filter(|word| !word.starts_with('-')).collect();
            let mut failed = 0;
            let (mut left, skipped) = (0, !rest.contains(&"--ignored"));
            for tests::Test { name, run: test, can_run } in tests::all() {
                let named =
                    |want: &&&str| if rest.contains(&"--exact") { name == **want } else { name.contains(**want) };
                if !wanted.is_empty() && !wanted.iter().any(&named) {
                    continue;
                }
                if !can_run && skipped {
                    println!("test {name} ... ignored");
                    left += 1;
                    continue;
                }
                println!("test {name} ...");
                let ok = std::panic::catch_unwind(test).is_ok();
                println!("test {name} ... {}", if ok { "ok" } else { "FAILED" });
                failed += u8::from(!ok);
            }
            if left > 0 {
                println!("not run: {left} that need firecracker, or a host on which its guests run");
            }
            ExitCode::from(failed)
        }
    }
}

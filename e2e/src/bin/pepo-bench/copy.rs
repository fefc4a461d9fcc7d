//! `pepo cp`.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::room::{Guest, Room};
use crate::table::{BULK, Goal, MIB, Row, median};

const FILES: usize = 5000;

/// `pepo cp` against tar piped through a raw stream.
pub fn copy(Room { instance, session, guest, .. }: &Room) -> Vec<Row> {
    let folder = tempfile::tempdir().expect("directory");
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("big")).expect("directory");
    fs::write(at("big/file"), vec![5u8; BULK]).expect("write");
    fs::create_dir(at("small")).expect("directory");
    for n in 0..FILES {
        fs::write(at("small").join(format!("{n}")), vec![b'x'; 1000]).expect("write");
    }
    let mut rows = vec![];
    for (name, what, amount, unit) in
        [("big", "256 MiB", (BULK / MIB) as f64, "MiB/s"), ("small", "5,000 small files", FILES as f64, "files/s")]
    {
        let clear = |what: &[&str]| {
            instance.pepo(["exec", session, "--", "rm", "-rf"].iter().chain(what)).ok();
        };
        let (mut ours_in, mut raw_in, mut ours_out, mut raw_out) = (vec![], vec![], vec![], vec![]);
        for _ in 0..3 {
            clear(&["there", "raw"]);
            let source = at(name).display().to_string();
            let ran = instance.pepo(["cp", &source, &format!("{session}:there")]).within(Duration::from_secs(600)).ok();
            ours_in.push(amount / ran.took.as_secs_f64());

            // A raw stream was seen reset in the middle; one that is says nothing of how fast they are.
            let took = (0..5).find_map(|_| {
                raw_into(guest, &at(name))
                    .inspect_err(|error| {
                        println!("      by hand, once more: {error}");
                        clear(&["raw"]);
                    })
                    .ok()
            });
            raw_in.push(amount / took.expect("a stream that lasts").as_secs_f64());

            let _ = fs::remove_dir_all(at("back"));
            let back = at("back").display().to_string();
            let ran = instance.pepo(["cp", &format!("{session}:there"), &back]).within(Duration::from_secs(600)).ok();
            ours_out.push(amount / ran.took.as_secs_f64());

            let _ = fs::remove_dir_all(at("back"));
            fs::create_dir(at("back")).expect("directory");
            let began = Instant::now();
            let mut stream = guest.raw("tar -cf - -C raw .");
            let mut tar = Command::new("tar")
                .args(["-xf", "-", "-C"])
                .arg(at("back"))
                .stdin(Stdio::piped())
                .spawn()
                .expect("tar");
            let mut into = tar.stdin.take().expect("piped");
            // tar ends at the archive's end mark and leaves the padding after it in the pipe.
            match std::io::copy(&mut stream, &mut into) {
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
                copied => drop(copied.expect("copy")),
            }
            drop(into);
            assert!(tar.wait().expect("tar").success());
            raw_out.push(amount / began.elapsed().as_secs_f64());
        }
        for (way, ours, raw) in [("in", ours_in, raw_in), ("out", ours_out, raw_out)] {
            let row = Row {
                what: format!("`cp` of {what} {way}"),
                ours: median(ours),
                unit,
                goal: Goal::AtLeast { reference: median(raw), ratio: 0.8 },
            };
            rows.push(row);
        }
    }
    rows
}

/// A directory into the guest by tar, through a raw stream.
fn raw_into(guest: &Guest, from: &Path) -> io::Result<Duration> {
    let began = Instant::now();
    // With whole records: one that is left unread would reset the stream.
    let mut stream = guest.raw("mkdir -p raw && tar -xBf - -C raw && echo done");
    let mut tar =
        Command::new("tar").args(["-cf", "-", "-C"]).arg(from).arg(".").stdout(Stdio::piped()).spawn().expect("tar");
    let copied = io::copy(&mut tar.stdout.take().expect("piped"), &mut stream);
    tar.wait().expect("tar");
    copied?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line)?;
    if line == "done\n" { Ok(began.elapsed()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

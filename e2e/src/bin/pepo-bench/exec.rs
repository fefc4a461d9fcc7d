//! Commands: how long one takes, and how fast their output comes.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::room::Room;
use crate::table::{BULK, Goal, Row, median, rate};

/// A command through the API against spawning the same in a loop in the guest, plus one echo over a raw stream.
pub fn exec(Room { instance, session, guest, .. }: &Room) -> Vec<Row> {
    const TIMES: usize = 100;
    let client = instance.client();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let (mut ours, mut reference) = (vec![], vec![]);
    let loop_line = format!(
        "import os, time\nb = time.monotonic()\nfor _ in range({TIMES}): os.waitpid(os.posix_spawn('/bin/true', ['true'], {{}}), 0)\nprint((time.monotonic() - b) / {TIMES})"
    );
    for _ in 0..3 {
        let spawn: f64 = instance
            .pepo(["exec", session, "--", "python3", "-c", &loop_line])
            .ok()
            .out()
            .trim()
            .parse()
            .expect("seconds");
        let mut stream = guest.raw("echo");
        let began = Instant::now();
        let mut bytes = [7u8; 64];
        for _ in 0..TIMES {
            stream.write_all(&bytes).expect("write");
            stream.read_exact(&mut bytes).expect("read");
        }
        reference.push(spawn + began.elapsed().as_secs_f64() / TIMES as f64);
        let _ = stream.shutdown(Shutdown::Both);
        ours.push(runtime.block_on(async {
            let began = Instant::now();
            for _ in 0..TIMES {
                let command = pepo_api::CreateCommand { argv: Some(vec!["/bin/true".into()]), ..Default::default() };
                client.command_create(session, &command).await.expect("command");
            }
            began.elapsed().as_secs_f64() / TIMES as f64
        }));
    }
    let row = Row {
        what: "exec of `/bin/true`".into(),
        ours: median(ours) * 1e3,
        unit: "ms",
        goal: Goal::AtMost { reference: median(reference) * 1e3, ratio: 1.5 },
    };
    vec![row]
}

/// Output of a command to the host against the same bytes over a raw stream.
pub fn stdout(Room { instance, session, guest, .. }: &Room) -> Vec<Row> {
    let line = format!("head -c {BULK} /dev/zero");
    let (mut ours, mut reference) = (vec![], vec![]);
    for _ in 0..3 {
        let began = Instant::now();
        drained(guest.raw(&line), BULK);
        reference.push(rate(BULK, began.elapsed()));
        let ran = instance.pepo(["exec", session, "--", "bash", "-c", &line]).within(Duration::from_secs(300)).ok();
        assert_eq!(ran.stdout.len(), BULK);
        ours.push(rate(BULK, ran.took));
    }
    let row = Row {
        what: "256 MiB of stdout".into(),
        ours: median(ours),
        unit: "MiB/s",
        goal: Goal::AtLeast { reference: median(reference), ratio: 0.9 },
    };
    vec![row]
}

/// Reads so many bytes.
pub fn drained(mut stream: UnixStream, bytes: usize) {
    let mut buffer = vec![0u8; 1 << 18];
    let mut left = bytes;
    while left > 0 {
        let n = stream.read(&mut buffer).expect("read");
        assert!(n > 0, "{left} bytes did not come");
        left -= n;
    }
}

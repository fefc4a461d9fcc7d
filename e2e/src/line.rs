//! A program in a guest that answers lines: it is reached over a stream that stands, so also while the privileged half is
//! halted, and without the start of a program in what is measured.

use std::time::Duration;

use crate::Instance;
use crate::program::{Started, until};

const MINUTES: Duration = Duration::from_secs(300);

/// A program that says `ready`, and to each line `N …` of its input answers `N is ….`
pub struct Line {
    program: Started,
    asked: usize,
}

impl Line {
    /// Starts it.
    pub fn open(instance: &Instance, session: &str, words: &[&str]) -> Self {
        let words = [&["exec", "-i", session, "--"], words].concat();
        let program = instance.pepo(words).within(Duration::from_secs(3600)).open_stdin().start();
        program.says("ready", MINUTES);
        Line { program, asked: 0 }
    }

    /// What it answers.
    pub fn ask(&mut self, words: &str) -> String {
        self.asked += 1;
        let begins = format!("{} is ", self.asked);
        self.program.feed(format!("{} {words}\n", self.asked).as_bytes());
        until(words, MINUTES, || {
            assert!(self.program.runs(), "it ended: {}{}", self.program.so_far(), self.program.complaint());
            let said = self.program.so_far();
            said.lines().find_map(|line| line.strip_prefix(&begins)?.strip_suffix('.').map(str::to_owned))
        })
    }

    /// Ends it.
    pub fn close(mut self) {
        self.program.close();
        self.program.wait();
    }
}

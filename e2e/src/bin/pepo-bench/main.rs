//! `make bench`: the figures. Each is a ratio of two things measured in turn in this one run, so that a slow or busy machine
//! makes both slower. The reference is always the same job by hand: the same VMM with the same arguments, or a raw stream.

#![allow(clippy::panic, clippy::expect_used, reason = "a bench fails by panicking")]
#![allow(clippy::print_stdout, reason = "its table is its purpose")]

mod boot;
mod copy;
mod edge;
mod exec;
mod life;
mod many;
mod neighbours;
mod network;
mod nfs;
mod room;
mod table;
mod workspace;

use std::process::ExitCode;

use room::Room;
use table::Row;

/// What measures a group of figures.
enum Measure {
    /// In the one room that all of these share.
    Room(fn(&Room) -> Vec<Row>),
    /// In instances of its own.
    Alone(fn() -> Vec<Row>),
}

/// The groups by the names that the command line takes, in the order in which they are measured.
const GROUPS: &[(&str, Measure)] = &[
    ("boot", Measure::Room(boot::boot)),
    ("exec", Measure::Room(exec::exec)),
    ("stdout", Measure::Room(exec::stdout)),
    ("cp", Measure::Room(copy::copy)),
    ("edge", Measure::Alone(edge::edge)),
    ("warm", Measure::Alone(life::warm)),
    ("back", Measure::Alone(life::back)),
    ("many", Measure::Alone(many::many)),
    ("neighbours", Measure::Alone(neighbours::neighbours)),
    ("network", Measure::Alone(network::network)),
    ("attach", Measure::Alone(workspace::attach)),
    ("bulk", Measure::Alone(workspace::bulk)),
    ("files", Measure::Alone(workspace::small)),
    ("served", Measure::Alone(workspace::memory)),
];

/// `pepo-bench [GROUP…]`. Fails when a goal is missed.
fn main() -> ExitCode {
    let only: Vec<String> = std::env::args().skip(1).collect();
    match only.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [edge::BARE, body] => edge::bare_handler(body.to_owned(), None),
        [edge::BARE, body, socket] => edge::bare_handler(body.to_owned(), Some(socket)),
        [edge::PROXY, socket] => edge::bare_proxy(socket),
        _ => {}
    }
    for name in &only {
        let known: Vec<&str> = GROUPS.iter().map(|(name, _)| *name).collect();
        assert!(known.contains(&name.as_str()), "{name}: the groups of figures are {}", known.join(", "));
    }
    let mut room = None;
    let mut rows = vec![];
    for (name, measure) in GROUPS {
        if !only.is_empty() && !only.iter().any(|wanted| wanted == name) {
            continue;
        }
        let measured = match measure {
            Measure::Room(measure) => {
                let room = room.get_or_insert_with(|| {
                    let room = Room::open();
                    boot::memory(&room.guest);
                    room
                });
                measure(room)
            }
            Measure::Alone(measure) => {
                // Nothing else is at work meanwhile.
                if let Some(room) = room.take() {
                    room.close();
                }
                measure()
            }
        };
        for row in &measured {
            println!("      {}", row.verdict().1);
        }
        rows.extend(measured);
    }
    if let Some(room) = room {
        room.close();
    }
    println!("\n| what | ours | by hand | ratio | goal |\n|---|---|---|---|---|");
    let mut code = ExitCode::SUCCESS;
    for (met, line) in rows.iter().map(Row::verdict) {
        println!("{line}");
        if !met {
            code = ExitCode::FAILURE;
        }
    }
    code
}

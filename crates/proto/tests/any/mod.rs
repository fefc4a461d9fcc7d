//! Any frame there can be, for the property tests.

use bytes::Bytes;
use pepo_proto::*;
use proptest::collection::vec;
use proptest::option::of;
use proptest::prelude::*;

fn op() -> impl Strategy<Value = OpId> {
    any::<[u8; 16]>().prop_map(OpId)
}

/// Any text, not only pretty text.
fn text() -> impl Strategy<Value = String> {
    vec(any::<char>(), 0..12).prop_map(String::from_iter)
}

fn octets() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..40)
}

fn variables() -> impl Strategy<Value = Vec<Variable>> {
    vec((text(), text()).prop_map(|(name, value)| Variable { name, value }), 0..4)
}

fn pty() -> impl Strategy<Value = PtySize> {
    any::<(u16, u16)>().prop_map(|(cols, rows)| PtySize { cols, rows })
}

fn limits() -> impl Strategy<Value = Limits> {
    (of(any::<u64>()), of(any::<u64>()), of(any::<u64>())).prop_map(|(memory_bytes, pids, cpu_us)| Limits {
        memory_bytes,
        pids,
        cpu_us,
    })
}

fn exec() -> impl Strategy<Value = Exec> {
    (
        (vec(text(), 0..5), variables(), of(text()), of(text())),
        (any::<bool>(), of(pty()), any::<u64>(), any::<bool>(), of(text()), of(limits())),
    )
        .prop_map(|((argv, env, cwd, user), (stdin, pty, timeout_ms, detached, shell, limits))| Exec {
            argv,
            env,
            cwd,
            user,
            stdin,
            pty,
            timeout_ms,
            detached,
            shell,
            limits,
        })
}

fn network() -> impl Strategy<Value = Network> {
    any::<(u32, u8, u32, u64, u32)>().prop_map(|(address, prefix, gateway, gateway_mac, mtu)| Network {
        address,
        prefix,
        gateway,
        gateway_mac,
        mtu,
    })
}

fn operation() -> impl Strategy<Value = Operation> {
    let path = || (text(), of(text()));
    prop_oneof![
        any::<(u32, u32, u64)>().prop_map(|(oldest, newest, features)| Operation::Hello(Hello {
            oldest,
            newest,
            features
        })),
        of(network()).prop_map(|network| Operation::Ready(Ready { network })),
        any::<i64>().prop_map(|add_ns| Operation::Clock(Clock { add_ns })),
        (text(), variables(), any::<u64>(), octets(), of(network())).prop_map(
            |(hostname, env, clock_unix_ns, entropy, network)| {
                Operation::Activate(Activate { hostname, env, clock_unix_ns, entropy, network })
            }
        ),
        exec().prop_map(Operation::Exec),
        (op(), of(any::<u64>()), any::<bool>(), any::<bool>(), of(any::<bool>())).prop_map(
            |(target, from, input, keep_input, sole)| {
                Operation::Attach(Attach { target, from, input, keep_input, sole })
            }
        ),
        (op(), any::<i32>(), any::<bool>()).prop_map(|(target, signal, tree)| Operation::Signal(Signal {
            target,
            signal,
            tree
        })),
        (op(), pty()).prop_map(|(target, size)| Operation::Resize(Resize { target, size })),
        op().prop_map(|target| Operation::Cancel(Cancel { target })),
        op().prop_map(|stream| Operation::Leave(Leave { stream })),
        Just(Operation::Ops),
        Just(Operation::Ping),
        (path(), any::<u64>(), of(any::<u64>())).prop_map(|((path, user), offset, length)| Operation::Read(Read {
            path,
            offset,
            length,
            user
        })),
        (path(), of(any::<u32>()), any::<bool>()).prop_map(|((path, user), mode, parents)| Operation::Write(Write {
            path,
            mode,
            parents,
            user
        })),
        path().prop_map(|(path, user)| Operation::List(List { path, user })),
        path().prop_map(|(path, user)| Operation::Stat(Stat { path, user })),
        (path(), of(text()), of(any::<u32>()), any::<bool>()).prop_map(|((path, user), target, mode, parents)| {
            let kind = target.map_or(MakeKind::Directory, MakeKind::Symlink);
            Operation::Make(Make { path, kind, mode, parents, user })
        }),
        (path(), text()).prop_map(|((from, user), to)| Operation::Rename(Rename { from, to, user })),
        (path(), any::<bool>()).prop_map(|((path, user), recursive)| Operation::Remove(Remove {
            path,
            recursive,
            user
        })),
        (path(), any::<bool>()).prop_map(|((path, user), recursive)| Operation::Watch(Watch { path, recursive, user })),
        path().prop_map(|(path, user)| Operation::TarOut(TarOut { path, user })),
        path().prop_map(|(path, user)| Operation::TarIn(TarIn { path, user })),
        any::<u16>().prop_map(|port| Operation::Dial(Dial { port })),
        Just(Operation::Stats),
        Just(Operation::Sync),
        Just(Operation::Shutdown),
    ]
}

fn stat() -> impl Strategy<Value = FileStat> {
    let kind = prop_oneof![
        Just(EntryKind::File),
        Just(EntryKind::Directory),
        Just(EntryKind::Symlink),
        Just(EntryKind::Other)
    ];
    (octets(), kind, any::<(u64, u32, u32, u32, i64)>(), of(octets())).prop_map(|(name, kind, numbers, target)| {
        let (size, mode, uid, gid, modified_unix_ns) = numbers;
        FileStat { name, kind, size, mode, uid, gid, modified_unix_ns, target: target.map(Into::into) }
    })
}

fn event() -> impl Strategy<Value = Event> {
    let summary = (
        op(),
        prop_oneof![Just(OpState::Attached), Just(OpState::Unattended), Just(OpState::Ended)],
        any::<(bool, u64, u64)>(),
        of(outcome()),
    )
        .prop_map(|(op, state, (detached, kept_from, next), outcome)| OpSummary {
            op,
            state,
            detached,
            kept_from,
            next,
            outcome,
        });
    let watched = prop_oneof![
        Just(WatchKind::Created),
        Just(WatchKind::Modified),
        Just(WatchKind::Attributes),
        Just(WatchKind::Removed),
        Just(WatchKind::Overflow)
    ];
    prop_oneof![
        (any::<(u32, u64, u64, bool)>(), text(), text()).prop_map(
            |((generation, features, boot_ms, activated), build, kernel)| {
                Event::Hello(HelloReply { generation, features, build, kernel, boot_ms, activated })
            }
        ),
        any::<u32>().prop_map(|pid| Event::Started { pid }),
        any::<(u64, bool)>().prop_map(|(next, open)| Event::Input { next, open }),
        stat().prop_map(Event::Stat),
        vec(stat(), 0..6).prop_map(Event::Entries),
        vec(summary, 0..6).prop_map(Event::Ops),
        any::<(u64, u64, u64, u64, u64, u64, u32, u32)>().prop_map(|n| Event::Stats(Stats {
            uptime_ms: n.0,
            cpu_ms: n.1,
            memory_bytes: n.2,
            memory_available_bytes: n.3,
            disk_bytes: n.4,
            disk_used_bytes: n.5,
            processes: n.6,
            commands: n.7,
        })),
        (watched, octets()).prop_map(|(kind, path)| Event::Change { kind, path }),
        any::<u64>().prop_map(|bytes| Event::Taken { bytes }),
        any::<u64>().prop_map(|unix_ns| Event::Clock { unix_ns }),
    ]
}

fn outcome() -> impl Strategy<Value = Outcome> {
    let cause = prop_oneof![
        Just(Cause::Exit),
        Just(Cause::Signal),
        Just(Cause::Timeout),
        Just(Cause::Killed),
        Just(Cause::OutOfMemory)
    ];
    let code = prop_oneof![
        Just(FailureCode::Invalid),
        Just(FailureCode::NotFound),
        Just(FailureCode::NoSpace),
        Just(FailureCode::UnknownOp),
        Just(FailureCode::Refused),
        Just(FailureCode::Io)
    ];
    let process = (cause, of(any::<i32>()), of(any::<i32>()), any::<(u64, u64, u64)>(), of(text())).prop_map(
        |(cause, code, signal, (stdout_bytes, stderr_bytes, elapsed_ms), cwd)| {
            Outcome::Process(Process { cause, code, signal, stdout_bytes, stderr_bytes, elapsed_ms, cwd })
        },
    );
    prop_oneof![
        Just(Outcome::Done),
        process,
        (code, text()).prop_map(|(code, message)| Outcome::Failed(Failure { code, message })),
    ]
}

/// Any frame that may be sent.
pub fn frame() -> impl Strategy<Value = Frame> {
    let channel = || prop_oneof![Just(Channel::In), Just(Channel::Out), Just(Channel::Err)];
    prop_oneof![
        (op(), operation(), any::<Option<bool>>()).prop_map(|(op, operation, paced)| Frame::Request(Request {
            op,
            operation,
            paced
        })),
        Just(Frame::Accepted),
        (channel(), any::<u64>(), vec(any::<u8>(), 1..300)).prop_map(|(channel, offset, bytes)| Frame::Data {
            channel,
            offset,
            bytes: Bytes::from(bytes)
        }),
        (channel(), any::<u64>()).prop_map(|(channel, offset)| Frame::Eof { channel, offset }),
        (any::<u64>(), any::<u64>()).prop_filter_map("a gap is not empty", |(a, b)| {
            (a != b).then(|| Frame::Gap { from: a.min(b), to: a.max(b) })
        }),
        event().prop_map(Frame::Event),
        outcome().prop_map(Frame::End),
    ]
}

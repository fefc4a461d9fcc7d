//! What is said to Firecracker, against the facts of its API (`tests/data/firecracker-api.json`: names, types and bounds).

use std::collections::BTreeMap;

use serde::Deserialize;

use super::*;

/// The facts of the release's API.
#[derive(Deserialize)]
pub(super) struct Facts {
    release: String,
    calls: BTreeMap<String, BTreeMap<String, String>>,
    bodies: BTreeMap<String, Value>,
}

impl Facts {
    pub(super) fn new() -> Self {
        serde_json::from_str(include_str!("../../../tests/data/firecracker-api.json")).expect("facts")
    }

    /// What is wrong with a call, by the facts.
    pub(super) fn faults(&self, call: &Call) -> Vec<String> {
        let name = |pattern: &str| {
            let (pattern, path) = (pattern.split('/'), call.path.split('/'));
            let mut pairs = pattern.clone().zip(path.clone());
            pattern.count() == path.count() && pairs.all(|(a, b)| a == b || a.starts_with('{') && !b.is_empty())
        };
        let known =
            |known: &&String| known.split_once(' ').is_some_and(|(verb, path)| verb == call.method && name(path));
        let Some(known) = self.calls.keys().find(known) else { return vec!["there is no such call".to_owned()] };
        let mut faults = Vec::new();
        match (&call.body, self.calls[known].get("body")) {
            (Some(body), Some(wanted)) => self.check(wanted, body, &mut faults),
            (None, None) => {}
            (body, wanted) => faults.push(format!("its body is {body:?}, and should be {wanted:?}")),
        }
        // The id in the path is that in the body, of letters, digits and underscores alone.
        if let Some((_, field)) = known.split_once('{') {
            let id = call.path.rsplit('/').next().unwrap_or_default();
            let said = call.body.as_ref().and_then(|body| body[field.trim_end_matches('}')].as_str());
            if said != Some(id) || !id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
                faults.push(format!("the id {id} is {said:?} in the body"));
            }
        }
        faults
    }

    fn check(&self, name: &str, body: &Value, faults: &mut Vec<String>) {
        let (Some(fields), Some(body)) = (self.bodies[name].as_object(), body.as_object()) else {
            return faults.push(format!("{name} is not an object"));
        };
        for (field, value) in body {
            // Unknown fields are refused by Firecracker itself.
            match fields.get(field).or_else(|| fields.get(&format!("{field}!"))).and_then(Value::as_str) {
                Some(kind) => self.check_value(&format!("{name}.{field}"), kind, value, faults),
                None => faults.push(format!("{name} has no field {field}")),
            }
        }
        let missing =
            fields.keys().filter_map(|field| field.strip_suffix('!')).filter(|field| !body.contains_key(*field));
        faults.extend(missing.map(|field| format!("{name} lacks {field}")));
    }

    fn check_value(&self, place: &str, kind: &str, value: &Value, faults: &mut Vec<String>) {
        let good = match kind.split_once(' ').map_or((kind, None), |(kind, bounds)| (kind, Some(bounds))) {
            ("string", _) => value.is_string(),
            ("boolean", _) => value.is_boolean(),
            ("integer", bounds) => value.as_u64().is_some_and(|number| {
                let (low, high) = bounds.and_then(|bounds| bounds.split_once("..")).unwrap_or_default();
                low.parse().is_ok_and(|low| number < low) as u8 + high.parse().is_ok_and(|high| number > high) as u8
                    == 0
            }),
            (other, _) if other.starts_with('@') => return self.check(&other[1..], value, faults),
            _ => value.as_str().is_some_and(|text| kind.split('|').any(|one| one == text)),
        };
        if !good {
            faults.push(format!("{place} is {value}, and should be {kind}"));
        }
    }
}

pub(super) fn boot() -> Boot {
    Boot {
        vcpus: 2,
        memory_mib: 1024,
        kernel: PathBuf::new(),
        initrd: PathBuf::new(),
        arguments: vec!["pepo.guest=1".to_owned()],
        scratch_size: 4 << 30,
        throttle: None,
        uid: 0x7000_0001,
        interface: None,
    }
}

fn interface(packets_per_second: u32) -> Option<Interface> {
    Some(Interface { mac: "02:70:65:70:6f:02".to_owned(), packets_per_second })
}

fn boots() -> Vec<Boot> {
    let throttle = |bytes, operations| Some(Throttle { bytes, operations });
    vec![
        boot(),
        Boot { vcpus: 32, memory_mib: 1_048_576, throttle: throttle(1, 1), ..boot() },
        Boot { vcpus: 1, memory_mib: 128, throttle: throttle(u64::MAX, u64::MAX), ..boot() },
        Boot { vcpus: 3, throttle: throttle(100 << 20, 5000), ..boot() },
        Boot { interface: interface(50_000), ..boot() },
        Boot { interface: interface(0), ..boot() },
    ]
}

fn body<'a>(calls: &'a [Call], path: &str) -> &'a Value {
    calls.iter().find(|call| call.path == path).and_then(|call| call.body.as_ref()).expect(path)
}

#[test]
fn a_guest_sends_no_faster_than_it_may_and_has_no_interface_without_a_network() {
    let calls = configuration(&Boot { interface: interface(50_000), ..boot() });
    let device = body(&calls, "/network-interfaces/eth0");
    // Buckets are full again after their refill time, in milliseconds.
    assert_eq!(device["tx_rate_limiter"]["ops"], json!({ "size": 50_000, "refill_time": 1000 }));
    assert_eq!(device["host_dev_name"], TAP);
    assert!(configuration(&boot()).iter().all(|call| !call.path.starts_with("/network-interfaces")));
}

#[test]
fn every_call_is_one_that_the_release_takes() {
    let facts = Facts::new();
    assert_eq!(facts.release, RELEASE);
    for boot in boots() {
        for call in configuration(&boot).iter().chain([&start(), &statistics()]) {
            assert_eq!(facts.faults(call), [""; 0], "{call:?}");
        }
    }
    // The facts can tell: a wrong field, type, bound and path are seen.
    let wrong = [
        put("/vsock", json!({ "guest_cid": 2, "uds_path": "/x" })),
        put("/vsock", json!({ "guest_cid": 3 })),
        put("/vsock", json!({ "guest_cid": 3, "uds_path": "/x", "more": 1 })),
        put("/drives/a-b", json!({ "drive_id": "a-b", "is_root_device": false })),
        put("/drives/a", json!({ "drive_id": "b", "is_root_device": false })),
        put("/machine-config", json!({ "vcpu_count": 33, "mem_size_mib": 1 })),
        put("/nothing", json!({})),
    ];
    for call in wrong {
        assert!(!facts.faults(&call).is_empty(), "{call:?} was taken");
    }
}

#[test]
fn the_order_and_every_default_that_bites_are_said() {
    let calls = configuration(&boot());
    let at = |path: &str| calls.iter().position(|call| call.path == path).expect(path);
    assert!(at("/machine-config") < at("/balloon"), "a balloon is checked against the memory");
    assert!(at("/drives/system") < at("/drives/scratch"), "the guest knows its disks by their order");
    assert!(!calls.contains(&start()) && calls.iter().all(|call| call.method == "PUT"));
    assert_eq!(body(&calls, "/drives/system")["is_read_only"], true);
    assert_eq!(body(&calls, "/drives/scratch")["is_read_only"], false);
    for call in calls.iter().filter(|call| call.path.starts_with("/drives/")) {
        assert_eq!(call.body.as_ref().expect("body")["is_root_device"], false, "the initial ramdisk mounts");
    }
    let line = body(&calls, "/boot-source")["boot_args"].as_str().expect("line");
    assert!(!line.split(' ').any(|word| word == "nomodule"), "the guest's drivers are modules");
    assert!(line.ends_with("pepo.guest=1") && line.len() < 1024, "{line}");
    // Nothing of a host's path is said: all of it lies in the root.
    let said = format!("{calls:?}");
    assert!(!said.contains("/var/") && !said.contains("/tmp"), "{said}");
    assert!(
        !calls.iter().any(|call| ["/snapshot", "/vm", "/mmds", "/metrics"].iter().any(|p| call.path.starts_with(p)))
    );
    // No device is left without an end to what a guest makes the host do.
    assert!(body(&calls, "/serial")["rate_limiter"]["size"].as_u64() == Some(CONSOLE_RATE));
    assert!(body(&calls, "/entropy")["rate_limiter"]["bandwidth"].is_object());
}

#[test]
fn a_limit_keeps_its_rate_and_holds_the_largest_operation() {
    for (bytes, operations) in [(1 << 16, 1), (10 << 20, 100), (1 << 30, 50_000)] {
        let boot = Boot { throttle: Some(Throttle { bytes, operations }), ..boot() };
        let calls = configuration(&boot);
        for disk in ["/drives/system", "/drives/scratch"] {
            let limiter = &body(&calls, disk)["rate_limiter"];
            let rate = |bucket: &str| {
                let number = |field: &str| limiter[bucket][field].as_u64().expect("a number") as f64;
                (number("size"), number("size") * 1000.0 / number("refill_time"))
            };
            let (size, rate_of_bytes) = rate("bandwidth");
            assert!(size >= LARGEST_OPERATION as f64, "{limiter}");
            assert!((rate_of_bytes / bytes as f64 - 1.0).abs() < 0.01, "{limiter} is {rate_of_bytes}, not {bytes}");
            let (_, rate_of_operations) = rate("ops");
            assert!((rate_of_operations / operations as f64 - 1.0).abs() < 0.01, "{limiter}");
        }
    }
}

#[test]
fn the_jailer_is_told_what_keeps_its_exit_status_and_its_hands_off_cgroups() {
    let closure = Closure {
        digest: "ab".to_owned(),
        root: "/state/jail/vmm/ab".into(),
        program: "/firecracker".into(),
        env: Vec::new(),
    };
    let id = "01a22a443f729b996f093cf3cb000000";
    let base = Path::new("/state/jail/x/boot");
    let spec = command(&closure, &boot(), base, id, 10, 11);
    let words: Vec<&str> = spec.argv.iter().map(String::as_str).collect();
    for never in ["--daemonize", "--new-pid-ns", "--cgroup", "--no-seccomp", "--seccomp-filter", "--netns"] {
        assert!(!words.contains(&never), "{never}");
    }
    let after = |flag: &str| words[words.iter().position(|word| *word == flag).expect(flag) + 1];
    assert_eq!((after("--uid"), after("--gid")), ("1879048193", "1879048193"));
    assert_eq!((after("--id"), after("--cgroup-version")), (id, "1"));
    assert!(id.len() <= 64 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()));
    assert_eq!(after("--exec-file"), "/state/jail/vmm/ab/firecracker");
    assert_eq!(root(base, id), Path::new("/state/jail/x/boot/firecracker").join(id).join("root"));
    // What is bound inside is short, however long the host's path is: sockets are reached through descriptors.
    assert!(after("--api-sock").len() < 30 && after("--log-path") == "/log");
    assert_eq!(spec.entry, Entry::Official);
    assert!(spec.limits.file_size >= boot().scratch_size, "less would be a death by signal in the middle of a write");
}

#[test]
fn ends_have_meanings() {
    assert!(meaning(148).is_some_and(|text| text.contains("filter")));
    assert!((149..=157).filter(|code| *code != 155).all(|code| meaning(code).is_some()));
    assert_eq!((meaning(0), meaning(1)), (None, None));
}

#[test]
fn the_guests_memory_is_read_only_when_it_is_there() {
    let answer = json!({ "target_pages": 0, "actual_pages": 0, "target_mib": 0, "actual_mib": 0 });
    assert_eq!(GuestMemory::read(&answer), None);
    let answer = json!({ "total_memory": 100, "free_memory": 7, "available_memory": 50, "disk_caches": "x" });
    let memory = GuestMemory::read(&answer).expect("memory");
    assert_eq!((memory.total_bytes, memory.free_bytes, memory.available_bytes, memory.cached_bytes), (100, 7, 50, 0));
    assert_eq!(GuestMemory::read(&Value::Null), None);
}

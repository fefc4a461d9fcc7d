//! What is typed behind a flag: sizes, durations, `name=value`, copies. Pure; the texts of refusals are golden.

use std::path::{Path, PathBuf};

use pepo_api::{
    CommandLimits, HostVolume, NetworkMode, NetworkProtocol, NetworkRule, NetworkSpec, WorkspaceChoice, WorkspaceMode,
};

/// A size in MiB: a bare number, or `512m`, `2G`, `1T` (powers of 1024).
pub fn mebibytes(text: &str) -> Result<u32, String> {
    let wrong = || format!("`{text}` is not a size: a bare number is MiB, else 512m, 2G, 1T");
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" | "m" | "mb" | "mib" => 1,
        "g" | "gb" | "gib" => 1024,
        "t" | "tb" | "tib" => 1024 * 1024,
        _ => return Err(wrong()),
    };
    match number.checked_mul(factor).and_then(|mib| u32::try_from(mib).ok()) {
        Some(0) => Err("0 is no size".into()),
        Some(mib) => Ok(mib),
        None => Err(format!("{text} is more than any machine has")),
    }
}

/// A duration in seconds: a bare number, or `90s`, `5m`, `1h`, `2d`, or several in falling order (`1h30m`).
pub fn seconds(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a duration: a bare number is seconds, else 90s, 5m, 1h, 1h30m");
    if let Ok(number) = text.parse::<u64>()
        && text.bytes().all(|b| b.is_ascii_digit())
    {
        return Ok(number);
    }
    let (mut rest, mut total, mut last) = (text, 0u64, u64::MAX);
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let number: u64 = rest[..digits].parse().map_err(|_| wrong())?;
        let letters = rest[digits..].bytes().take_while(u8::is_ascii_alphabetic).count();
        let factor = match &rest[digits..digits + letters] {
            "s" => 1,
            "m" => 60,
            "h" => 3600,
            "d" => 86_400,
            "ms" => return Err(format!("`{text}`: whole seconds are the smallest step")),
            _ => return Err(wrong()),
        };
        if factor >= last {
            return Err(wrong());
        }
        last = factor;
        total = number.checked_mul(factor).and_then(|s| total.checked_add(s)).ok_or_else(wrong)?;
        rest = &rest[digits + letters..];
    }
    if text.is_empty() { Err(wrong()) } else { Ok(total) }
}

/// `--limit`: `memory=256m,pids=64,cpus=0.5`, each at most once.
pub fn limits(text: &str) -> Result<CommandLimits, String> {
    let mut limits = CommandLimits::default();
    for part in text.split(',') {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        let whole = |what: &str| value.parse::<u32>().map_err(|_| format!("{what}=`{value}` is not a number"));
        let (slot, number) = match name {
            "memory" => (&mut limits.memory_mib, mebibytes(value)?),
            "pids" => (&mut limits.pids, whole("pids")?),
            "cpus" => (&mut limits.cpu_percent, hundredths(value)?),
            _ => return Err(format!("`{name}` is no limit: memory=SIZE, pids=N, cpus=N")),
        };
        if slot.replace(number).is_some() {
            return Err(format!("`{name}` is there twice"));
        }
    }
    Ok(limits)
}

/// A number with at most two digits behind its point, in hundredths.
fn hundredths(text: &str) -> Result<u32, String> {
    let wrong = || format!("cpus=`{text}` is not a number of processors: 1, 0.5, 1.25");
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || part.len() > 2 || !digits(whole) || !digits(part) {
        return Err(wrong());
    }
    let all = format!("{whole}{part:0<2}");
    all.parse().map_err(|_| wrong())
}

/// `NAME=VALUE`, or `NAME` alone for the caller's own value; `None` when that is not set.
pub fn variable(text: &str, own: impl Fn(&str) -> Option<String>) -> Result<Option<(String, String)>, String> {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => (text, own(text)),
    };
    if name.is_empty() || name.contains('\0') {
        return Err(format!("`{text}` is not a variable: NAME=VALUE, or NAME to pass on your own"));
    }
    Ok(value.map(|value| (name.to_owned(), value)))
}

/// The lines of an `--env-file`: as [`variable`], with empty lines and `#` comments.
pub fn variables(text: &str, own: impl Fn(&str) -> Option<String>) -> Result<Vec<(String, String)>, String> {
    let mut all = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim_start();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        match variable(line, &own) {
            Ok(pair) => all.extend(pair),
            Err(why) => return Err(format!("line {}: {why}", number + 1)),
        }
    }
    Ok(all)
}

/// `KEY=VALUE`; a bare `KEY` has the empty value.
pub fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    if key.is_empty() {
        return Err(format!("`{text}` is not a label: KEY=VALUE"));
    }
    Ok((key.to_owned(), value.to_owned()))
}

/// `--service`: `NAME[:PORT]=COMMAND`.
pub fn service(text: &str) -> Result<pepo_api::ServiceSpec, String> {
    let told = || format!("`{text}` is not a service: NAME=COMMAND or NAME:PORT=COMMAND");
    let (head, command) = text.split_once('=').filter(|(_, command)| !command.is_empty()).ok_or_else(told)?;
    let (name, port) = match head.split_once(':') {
        Some((name, port)) => (name, Some(port.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(told)?)),
        None => (head, None),
    };
    if name.is_empty() {
        return Err(told());
    }
    Ok(pepo_api::ServiceSpec { name: name.into(), command: command.into(), port, ready: None, restart: None })
}

/// Which Workspace was asked for; `None`: none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workspace(pub Option<WorkspaceChoice>);

/// `--workspace`: an id, a name, `own` or `none`, and `:ro` behind it.
pub fn workspace(text: &str) -> Result<Workspace, String> {
    let (which, mode) = match text.rsplit_once(':') {
        Some((which, "ro")) => (which, Some(WorkspaceMode::Ro)),
        Some((which, "rw")) => (which, Some(WorkspaceMode::Rw)),
        Some((_, other)) => return Err(format!("`{other}` is neither ro nor rw")),
        None => (text, None),
    };
    Ok(Workspace(match which {
        "" => return Err("a Workspace's id or name, `own` or `none`".into()),
        "none" => None,
        "own" => Some(WorkspaceChoice { own: Some(true), mode, ..WorkspaceChoice::default() }),
        which => match which.parse() {
            Ok(id) => Some(WorkspaceChoice { id: Some(id), mode, ..WorkspaceChoice::default() }),
            Err(_) => Some(WorkspaceChoice { name: Some(which.into()), mode, ..WorkspaceChoice::default() }),
        },
    }))
}

/// `--net`: `none`, `public`, or `allow=` and entries with commas between, each a preset, a name or a range, the latter two
/// with `:PORT` (several with `+`) and `/tcp`, `/udp` or `/icmp` as wanted.
pub fn network(text: &str) -> Result<NetworkSpec, String> {
    let plain = |mode| NetworkSpec { mode, ..NetworkSpec::default() };
    match text.split_once('=') {
        None if text == "none" => Ok(plain(NetworkMode::None)),
        None if text == "public" => Ok(plain(NetworkMode::Public)),
        Some(("allow", entries)) => {
            let entries = entries.split(',').map(str::trim).filter(|entry| !entry.is_empty());
            let allow = entries.map(network_rule).collect::<Result<Vec<_>, _>>()?;
            Ok(NetworkSpec { allow: Some(allow), ..plain(NetworkMode::Allow) })
        }
        _ => {
            Err(format!("`{text}` is not a network policy: none, public, or allow=pypi,api.example.com:443,1.2.3.0/24"))
        }
    }
}

fn network_rule(text: &str) -> Result<NetworkRule, String> {
    let (rest, protocol) = match text.rsplit_once('/') {
        Some((rest, "tcp")) => (rest, Some(NetworkProtocol::Tcp)),
        Some((rest, "udp")) => (rest, Some(NetworkProtocol::Udp)),
        Some((rest, "icmp")) => (rest, Some(NetworkProtocol::Icmp)),
        _ => (text, None),
    };
    let (target, ports) = match rest.split_once(':') {
        // Two colons are an address of IPv6: the daemon says what is with that.
        Some((_, after)) if after.contains(':') => (rest, ""),
        Some((target, ports)) => (target, ports),
        None => (rest, ""),
    };
    let port = |port: &str| port.parse::<u16>().map_err(|_| format!("`{text}`: `{port}` is not a port"));
    let ports = ports.split('+').filter(|port| !port.is_empty()).map(port).collect::<Result<Vec<_>, _>>()?;
    let mut rule = NetworkRule { ports, protocol, ..NetworkRule::default() };
    let target = target.to_owned();
    let numbers = target.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'/'));
    if numbers || target.contains(['/', ':']) {
        rule.cidr = Some(target);
    } else if target.contains('.') || target == "localhost" {
        rule.domain = Some(target);
    } else if rule.ports.is_empty() && rule.protocol.is_none() {
        rule.preset = Some(target);
    } else {
        return Err(format!("`{text}`: a preset says itself what it opens"));
    }
    Ok(rule)
}

/// `SRC[:DST]` of `--copy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy {
    /// On this machine.
    pub source: PathBuf,
    /// In the Sandbox, where given.
    pub destination: Option<String>,
}

/// Reads a [`struct@Copy`]. A path that exists as typed is taken whole, so a colon in a name does no harm.
pub fn copy(text: &str) -> Result<Copy, String> {
    if text.is_empty() {
        return Err("the path to copy is empty".into());
    }
    if Path::new(text).symlink_metadata().is_ok() {
        return Ok(Copy { source: text.into(), destination: None });
    }
    match text.rsplit_once(':') {
        Some((source, destination)) if !source.is_empty() && !destination.is_empty() => {
            Ok(Copy { source: source.into(), destination: Some(destination.to_owned()) })
        }
        _ => Ok(Copy { source: text.into(), destination: None }),
    }
}

/// One side of `pepo cp`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// On this machine.
    Local(PathBuf),
    /// `SES:PATH`.
    Remote {
        /// The Session's id or name.
        session: String,
        /// Absolute, or under the home directory.
        path: String,
    },
    /// `-`: a tar stream.
    Stream,
}

/// Reads `HOSTDIR:/GUESTDIR[:ro]`. A relative directory is one below the current one.
pub fn host_volume(text: &str) -> Result<HostVolume, String> {
    let (rest, mode) = match text.strip_suffix(":ro") {
        Some(rest) => (rest, WorkspaceMode::Ro),
        None => (text.strip_suffix(":rw").unwrap_or(text), WorkspaceMode::Rw),
    };
    let wrong = || format!("`{text}` is not HOSTDIR:/GUESTDIR or HOSTDIR:/GUESTDIR:ro");
    let (source, target) = rest.rsplit_once(':').filter(|(source, _)| !source.is_empty()).ok_or_else(wrong)?;
    if !target.starts_with('/') {
        return Err(wrong());
    }
    let source = std::path::absolute(source).map_err(|error| format!("{source}: {error}"))?;
    let source =
        source.into_os_string().into_string().map_err(|_| "a path that is no text cannot be lent".to_owned())?;
    Ok(HostVolume { source, target: target.to_owned(), mode })
}

/// Reads one side of `pepo cp`: a colon before any slash makes it a Session's.
pub fn place(text: &str) -> Result<Place, String> {
    if text == "-" {
        return Ok(Place::Stream);
    }
    match text.split_once(':') {
        Some(("", _)) => Err(format!("`{text}`: the Session before the colon is missing")),
        Some((session, path)) if !session.contains('/') && session != "." && session != ".." => {
            let path = if path.is_empty() { "." } else { path };
            Ok(Place::Remote { session: session.to_owned(), path: path.to_owned() })
        }
        _ if text.is_empty() => Err("a path is empty".into()),
        _ => Ok(Place::Local(text.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_command() {
        let wanted = CommandLimits { memory_mib: Some(256), pids: Some(64), cpu_percent: Some(50) };
        assert_eq!(limits("memory=256m,pids=64,cpus=0.5"), Ok(wanted));
        for (text, percent) in [("cpus=2", 200), ("cpus=1.25", 125), ("cpus=0.05", 5)] {
            assert_eq!(limits(text), Ok(CommandLimits { cpu_percent: Some(percent), ..CommandLimits::default() }));
        }
        let wrong = |t| limits(t).unwrap_err();
        assert_eq!(wrong("disk=1"), "`disk` is no limit: memory=SIZE, pids=N, cpus=N");
        assert_eq!(wrong("pids=x"), "pids=`x` is not a number");
        assert_eq!(wrong("pids=1,pids=2"), "`pids` is there twice");
        for text in ["", "memory", "cpus=", "cpus=.5", "cpus=1.234", "cpus=-1", "memory=0"] {
            assert!(limits(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_volume_is_a_directory_a_place_and_perhaps_read_only() {
        let volume = host_volume("/srv/data:/data:ro").expect("a volume");
        assert_eq!((&*volume.source, &*volume.target, volume.mode), ("/srv/data", "/data", WorkspaceMode::Ro));
        let volume = host_volume("/a:b:/data").expect("a colon in the directory's name");
        assert_eq!((&*volume.source, volume.mode), ("/a:b", WorkspaceMode::Rw));
        let here = host_volume(".:/data").expect("relative");
        assert!(here.source.starts_with('/'), "{here:?}");
        for bad in ["", "/a", "/a:b", ":/data", "/a:ro"] {
            assert!(host_volume(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes() {
        for (text, mib) in [("512", 512), ("512m", 512), ("2G", 2048), ("2gib", 2048), ("1T", 1 << 20), ("1MiB", 1)] {
            assert_eq!(mebibytes(text), Ok(mib), "{text}");
        }
        let wrong = |t| mebibytes(t).unwrap_err();
        assert_eq!(wrong("2x"), "`2x` is not a size: a bare number is MiB, else 512m, 2G, 1T");
        assert_eq!(wrong(""), "`` is not a size: a bare number is MiB, else 512m, 2G, 1T");
        assert_eq!(wrong("-1"), "`-1` is not a size: a bare number is MiB, else 512m, 2G, 1T");
        assert_eq!(wrong("1.5G"), "`1.5G` is not a size: a bare number is MiB, else 512m, 2G, 1T");
        assert_eq!(wrong("0"), "0 is no size");
        assert_eq!(wrong("9999999T"), "9999999T is more than any machine has");
        assert_eq!(
            wrong("99999999999999999999"),
            "`99999999999999999999` is not a size: a bare number is MiB, else 512m, 2G, 1T"
        );
    }

    #[test]
    fn durations() {
        for (text, s) in
            [("0", 0), ("90", 90), ("90s", 90), ("5m", 300), ("1h", 3600), ("1h30m", 5400), ("2d", 172_800)]
        {
            assert_eq!(seconds(text), Ok(s), "{text}");
        }
        let wrong = |t| seconds(t).unwrap_err();
        assert_eq!(wrong("soon"), "`soon` is not a duration: a bare number is seconds, else 90s, 5m, 1h, 1h30m");
        assert_eq!(wrong("500ms"), "`500ms`: whole seconds are the smallest step");
        for text in ["", "-5", "+5", "5 m", "1m1h", "1h1h", "m", "1h30", "99999999999999999d", "5µ"] {
            assert!(wrong(text).contains("is not a duration"), "{text}");
        }
    }

    #[test]
    fn variables_and_labels() {
        let own = |name: &str| (name == "HOME").then(|| "/root".to_owned());
        assert_eq!(variable("A=b=c", own), Ok(Some(("A".into(), "b=c".into()))));
        assert_eq!(variable("A=", own), Ok(Some(("A".into(), String::new()))));
        assert_eq!(variable("HOME", own), Ok(Some(("HOME".into(), "/root".into()))));
        assert_eq!(variable("NOT_SET", own), Ok(None));
        assert!(variable("=x", own).is_err());
        let file = "# a\n\n A=1\nHOME\nNOT_SET\nB='x y'\n";
        let expected = [("A", "1"), ("HOME", "/root"), ("B", "'x y'")].map(|(n, v)| (n.to_owned(), v.to_owned()));
        assert_eq!(variables(file, own).unwrap(), expected);
        assert_eq!(
            variables("A=1\n=2", own).unwrap_err(),
            "line 2: `=2` is not a variable: NAME=VALUE, or NAME to pass on your own"
        );
        assert_eq!(label("user=42"), Ok(("user".into(), "42".into())));
        assert_eq!(label("=42"), Err("`=42` is not a label: KEY=VALUE".into()));
    }

    #[test]
    fn networks_are_presets_names_and_ranges() {
        let read = |text: &str| serde_json::to_string(&network(text).expect(text)).expect("json");
        assert_eq!(read("none"), r#"{"mode":"none"}"#);
        assert_eq!(read("public"), r#"{"mode":"public"}"#);
        assert_eq!(
            read("allow=pypi,api.example.com:443,1.2.3.0/24, *.example.org:80+443, 9.9.9.9:53/udp"),
            concat!(
                r#"{"mode":"allow","allow":[{"preset":"pypi"},{"domain":"api.example.com","ports":[443]},"#,
                r#"{"cidr":"1.2.3.0/24"},{"domain":"*.example.org","ports":[80,443]},"#,
                r#"{"cidr":"9.9.9.9","ports":[53],"protocol":"udp"}]}"#
            )
        );
        assert_eq!(read("allow="), r#"{"mode":"allow","allow":[]}"#);
        assert_eq!(
            network("lan").unwrap_err(),
            "`lan` is not a network policy: none, public, or allow=pypi,api.example.com:443,1.2.3.0/24"
        );
        assert_eq!(network("allow=a.b:x").unwrap_err(), "`a.b:x`: `x` is not a port");
        assert_eq!(network("allow=pypi:443").unwrap_err(), "`pypi:443`: a preset says itself what it opens");
    }

    #[test]
    fn places() {
        assert_eq!(place("-"), Ok(Place::Stream));
        assert_eq!(place("./a:b"), Ok(Place::Local("./a:b".into())));
        assert_eq!(place("a/b"), Ok(Place::Local("a/b".into())));
        assert_eq!(place("web:/srv"), Ok(Place::Remote { session: "web".into(), path: "/srv".into() }));
        assert_eq!(place("web:"), Ok(Place::Remote { session: "web".into(), path: ".".into() }));
        assert!(place(":/x").is_err());
    }

    #[test]
    fn copies() {
        let dir = tempfile::tempdir().unwrap();
        let odd = dir.path().join("a:b");
        std::fs::write(&odd, "").unwrap();
        assert_eq!(copy(odd.to_str().unwrap()).unwrap(), Copy { source: odd, destination: None });
        assert_eq!(copy("nope:/srv").unwrap(), Copy { source: "nope".into(), destination: Some("/srv".into()) });
        assert_eq!(copy("nope:").unwrap(), Copy { source: "nope:".into(), destination: None });
    }

    #[test]
    fn a_service_is_a_name_a_port_and_a_command() {
        let web = service("web:3000=npm run dev -- --a=b").unwrap();
        assert_eq!((web.name.as_str(), web.port, web.command.as_str()), ("web", Some(3000), "npm run dev -- --a=b"));
        assert_eq!(service("w=x").unwrap().port, None);
        for bad in ["web", "web=", "=x", ":1=x", "web:0=x", "web:x=y", "web:70000=x"] {
            assert!(service(bad).unwrap_err().contains("is not a service"), "{bad}");
        }
    }
}

//! The settings of a Session as they come in: what is wrong with them, what they are with the defaults, and whether a
//! Session that is there is what they ask for.

use std::collections::BTreeMap;

use pepo_api::{
    CreateSession, ErrorCode, ImageId, SecretText, ServiceSpec, SessionId, Setup, UpdateSession, WorkspaceChoice,
};
use pepo_sandbox::plan;
use zeroize::Zeroizing;

use super::{Call, Problem, app};
use crate::Pepod;
use crate::config::SandboxConfig;
use crate::network::Wrong;
use crate::secrets::Secrets;
use crate::session::{Error, NewSession, Spec, Update, secret};

/// What was asked for, with the defaults, or what is wrong with it.
pub(super) fn checked(pepod: &Pepod, call: Call, body: CreateSession) -> Result<NewSession, Problem> {
    let CreateSession {
        image,
        cpus,
        memory_mib,
        disk_mib,
        keep_alive_seconds,
        expires_seconds,
        env,
        network,
        labels,
        name,
        workspace,
        reactivate,
        persist,
        // Of a local caller, who is asked with the connection at hand.
        volumes: _,
        secrets,
        setup,
        services,
        // Of opening a key, which has looked at it.
        if_terminated: _,
    } = body;
    let network = network.unwrap_or_else(|| pepod.sessions().reach().unnamed(call.app));
    pepod.sessions().reach().allowed(call.app, &network)?;
    let config = pepod.sessions().config();
    let of_app = pepod.apps().get(call.app).map(|app| app.settings.clone()).unwrap_or_default();
    let (defaults, limits) = (of_app.defaults, of_app.limits);
    let workspace = chosen(config, workspace)?;
    let persist = persist.unwrap_or_default();
    check_persist(&persist, workspace.is_some())?;
    if let Some(name) = &name {
        check_name(name)?;
    }
    check_image("image", image.as_deref())?;
    check_labels(&labels)?;
    check_env("env", &env)?;
    let secrets = secrets.unwrap_or_default();
    check_secrets(secrets.iter().map(|(name, value)| (name, Some(value))), &env)?;
    secret::fits(secrets.iter().map(|(name, value)| (name.as_str(), value.expose().len())))?;
    let secrets = secrets.into_iter().map(|(name, value)| (name, Zeroizing::new(value.expose().to_owned())));
    let secrets = Secrets(secrets.collect());
    let services = services.unwrap_or_default();
    check_setup(setup.as_ref())?;
    check_services(&services)?;
    let expires_seconds = expires_seconds.or(defaults.expires_seconds);
    let expires_seconds = expires_seconds.map(|seconds| bounded("expires_seconds", seconds, 1)).transpose()?;
    let spec = Spec {
        name,
        key: None,
        image: image.or(defaults.image).unwrap_or_else(|| config.image.clone()),
        image_id: ImageId::from(uuid::Uuid::nil()),
        cpus: within("cpus", app::within("cpus", cpus, defaults.cpus, config.cpus, limits.cpus)?, &plan::CPUS)?,
        memory_mib: within(
            "memory_mib",
            app::within("memory_mib", memory_mib, defaults.memory_mib, config.memory_mib, limits.memory_mib)?,
            &plan::MEMORY_MIB,
        )?,
        disk_mib: within(
            "disk_mib",
            app::within("disk_mib", disk_mib, defaults.disk_mib, config.disk_mib, limits.disk_mib)?,
            &plan::DISK_MIB,
        )?,
        keep_alive_seconds: bounded(
            "keep_alive_seconds",
            app::within(
                "keep_alive_seconds",
                keep_alive_seconds,
                defaults.keep_alive_seconds,
                config.keep_alive.as_secs(),
                limits.keep_alive_seconds,
            )?,
            0,
        )?,
        env,
        secrets: secrets.0.keys().cloned().collect(),
        labels,
        expires_seconds,
        reactivate: reactivate.unwrap_or(false),
        setup,
        services,
        services_begun: None,
        network,
        workspace: None,
        persist,
        volumes: Vec::new(),
    };
    let expires_at = expires_seconds.and_then(expiry);
    Ok(NewSession { id: SessionId::generate(), app: call.app, spec, expires_at, workspace, secrets })
}

/// Which Workspace: its own where nothing is said, and none where that is said.
fn chosen(config: &SandboxConfig, given: Option<Option<WorkspaceChoice>>) -> Result<Option<WorkspaceChoice>, Problem> {
    match given {
        Some(None) => Ok(None),
        // The guest is a process of this host, which mounts nothing.
        #[cfg(feature = "fake")]
        None if config.vmm == crate::config::VmmChoice::Fake => Ok(None),
        #[cfg(feature = "fake")]
        Some(Some(_)) if config.vmm == crate::config::VmmChoice::Fake => {
            Err(Problem::unsupported("workspace", "a guest that is a process of this host can mount nothing"))
        }
        None => {
            let _ = config;
            Ok(Some(WorkspaceChoice { own: Some(true), ..WorkspaceChoice::default() }))
        }
        Some(Some(choice)) => Ok(Some(choice)),
    }
}

fn check_persist(paths: &[String], has_workspace: bool) -> Result<(), Problem> {
    if !paths.is_empty() && !has_workspace {
        return Err(Problem::invalid("persist", "paths are kept in a Workspace, and this Session has none"));
    }
    if paths.len() > 32 {
        return Err(Problem::invalid("persist", format!("{} paths; at most 32", paths.len())));
    }
    for path in paths {
        let below = path.strip_prefix("~/").or_else(|| path.strip_prefix('/'));
        let plain = below.is_some_and(|below| {
            !below.is_empty() && below.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
        });
        if !plain || path.len() > 1024 || path.contains('\0') || path.starts_with("/workspace") {
            let message =
                format!("`{}` is not `~/…` or a plain absolute path outside of /workspace", path.escape_debug());
            return Err(Problem::invalid("persist", message));
        }
    }
    Ok(())
}

/// What an update asks for, or what is wrong with it.
pub(super) fn changed(pepod: &Pepod, call: Call, body: UpdateSession) -> Result<Update, Problem> {
    let UpdateSession { name, labels, keep_alive_seconds, expires_seconds, network, env, secrets, setup, services } =
        body;
    if let Some(said) = &network {
        pepod.sessions().reach().allowed(call.app, said)?;
    }
    if let Some(name) = &name {
        check_name(name)?;
    }
    if let Some(labels) = &labels {
        check_labels(labels)?;
    }
    if let Some(env) = &env {
        check_env("env", env)?;
    }
    check_setup(setup.as_ref().and_then(Option::as_ref))?;
    check_services(services.as_deref().unwrap_or_default())?;
    let keep_alive_seconds = keep_alive_seconds.map(|seconds| bounded("keep_alive_seconds", seconds, 0)).transpose()?;
    if let (Some(seconds), Some(app)) = (keep_alive_seconds, pepod.apps().get(call.app)) {
        app::within("keep_alive_seconds", Some(seconds), None, seconds, app.settings.limits.keep_alive_seconds)?;
    }
    let expires_seconds = expires_seconds.map(|seconds| bounded("expires_seconds", seconds, 1)).transpose()?;
    let secrets = secrets.unwrap_or_default();
    check_secrets(secrets.iter().map(|(name, value)| (name, value.as_ref())), &env.clone().unwrap_or_default())?;
    let secrets = secrets
        .into_iter()
        .map(|(name, value)| (name, value.map(|value| Zeroizing::new(value.expose().to_owned()))))
        .collect();
    Ok(Update { name, labels, keep_alive_seconds, expires_seconds, env, secrets, setup, services, network })
}

/// Secrets are variables too, and no variable is both public and secret. No value is in a refusal.
fn check_secrets<'a>(
    secrets: impl Iterator<Item = (&'a String, Option<&'a SecretText>)>,
    env: &BTreeMap<String, String>,
) -> Result<(), Problem> {
    for (name, value) in secrets {
        if name.is_empty()
            || name.len() > 256
            || name.contains(['=', '\0'])
            || value.is_some_and(|value| value.expose().contains('\0'))
        {
            let name: String = name.chars().take(80).flat_map(char::escape_debug).collect();
            let message = format!("`{name}` is not a variable: 1 to 256 bytes, no `=` in it, no NUL in name or value");
            return Err(Problem::invalid("secrets", message));
        }
        if value.is_some() && env.contains_key(name) {
            let message = format!("`{}` is in `env` and in `secrets`; leave one out", name.escape_debug());
            return Err(Problem::invalid("secrets", message));
        }
    }
    Ok(())
}

/// Whether a Session is what was asked for, as far as that was said.
pub(super) fn same(asked: &CreateSession, spec: &Spec) -> Result<(), Error> {
    fn json<T: serde::Serialize>(value: &T) -> serde_json::Value {
        serde_json::to_value(value).unwrap_or_default()
    }
    let image = asked.image.as_ref().filter(|image| **image != spec.image_id.to_string());
    let settings = [
        ("image", image.map(json), json(&spec.image)),
        ("cpus", asked.cpus.as_ref().map(json), json(&spec.cpus)),
        ("memory_mib", asked.memory_mib.as_ref().map(json), json(&spec.memory_mib)),
        ("disk_mib", asked.disk_mib.as_ref().map(json), json(&spec.disk_mib)),
        ("keep_alive_seconds", asked.keep_alive_seconds.as_ref().map(json), json(&spec.keep_alive_seconds)),
        ("expires_seconds", asked.expires_seconds.as_ref().map(json), json(&spec.expires_seconds)),
        ("env", (!asked.env.is_empty()).then(|| json(&asked.env)), json(&spec.env)),
        ("labels", (!asked.labels.is_empty()).then(|| json(&asked.labels)), json(&spec.labels)),
        ("name", asked.name.as_ref().map(json), json(&spec.name)),
        ("reactivate", asked.reactivate.as_ref().map(json), json(&spec.reactivate)),
        ("setup", asked.setup.as_ref().map(json), json(&spec.setup)),
        ("services", asked.services.as_ref().map(json), json(&spec.services)),
        ("network", asked.network.as_ref().map(json), json(&spec.network)),
        ("persist", asked.persist.as_ref().map(json), json(&spec.persist)),
        (
            "workspace",
            asked.workspace.as_ref().and_then(|choice| differs(choice.as_ref(), spec)),
            json(&spec.workspace),
        ),
    ];
    for (field, wanted, has) in settings {
        if let Some(wanted) = wanted.filter(|wanted| *wanted != has) {
            return Err(Error::Differs { field: field.into(), has: has.to_string(), wanted: wanted.to_string() });
        }
    }
    Ok(())
}

/// What was asked for, where it is another Workspace than the Session's. One by name is as its id once was.
fn differs(choice: Option<&WorkspaceChoice>, spec: &Spec) -> Option<serde_json::Value> {
    let same = match (choice, &spec.workspace) {
        (None, None) => true,
        (Some(choice), Some(used)) => {
            let which = match choice.id {
                Some(id) => id == used.id,
                None => choice.name.is_some() != used.own,
            };
            which
                && choice.mode.is_none_or(|mode| mode == used.mode)
                && choice.keep.is_none_or(|keep| keep == used.keep)
                && choice.if_busy.is_none_or(|if_busy| if_busy == used.if_busy)
        }
        _ => false,
    };
    (!same).then(|| serde_json::to_value(choice).unwrap_or_default())
}

/// A key that can stand in a path.
pub(super) fn check_key(key: &str) -> Result<(), Problem> {
    let fits =
        (1..=128).contains(&key.len()) && !key.chars().any(|c| c.is_control() || c == '/') && key != "." && key != "..";
    match fits {
        true => Ok(()),
        false => Err(Problem::invalid(
            "key",
            "a key has 1 to 128 bytes, without `/` and control characters, and is not `.` or `..`",
        )),
    }
}

/// The longest line of a setup command or a Service.
const MOST_LINE: usize = 16 * 1024;

/// Services of one Session.
const MOST_SERVICES: usize = 16;

fn check_line(param: String, line: &str) -> Result<(), Problem> {
    if line.is_empty() || line.len() > MOST_LINE || line.contains('\0') {
        let message = format!("{param} must be a line of 1 to {MOST_LINE} bytes, without NUL");
        return Err(Problem::invalid(param, message));
    }
    Ok(())
}

fn check_setup(setup: Option<&Setup>) -> Result<(), Problem> {
    let Some(setup) = setup else { return Ok(()) };
    check_line("setup.command".into(), &setup.command)?;
    match setup.timeout_seconds() {
        1..=86_400 => Ok(()),
        other => {
            let message = format!("setup.timeout_seconds is {other}; it must be from 1 to 86400");
            Err(Problem::invalid("setup.timeout_seconds", message))
        }
    }
}

fn check_services(services: &[ServiceSpec]) -> Result<(), Problem> {
    if services.len() > MOST_SERVICES {
        return Err(Problem::invalid("services", format!("{} services; at most {MOST_SERVICES}", services.len())));
    }
    for (at, service) in services.iter().enumerate() {
        let param = |field: &str| format!("services[{at}].{field}");
        if !is_slug(&service.name) || service.name.starts_with("cmd_") {
            return Err(Problem::invalid(param("name"), format!("the name of a service: {SLUG}")));
        }
        if services[..at].iter().any(|other| other.name == service.name) {
            return Err(Problem::invalid(param("name"), format!("another service is called `{}`", service.name)));
        }
        check_line(param("command"), &service.command)?;
        if service.port == Some(0) {
            return Err(Problem::invalid(param("port"), "a port is a number from 1 to 65535"));
        }
        let Some(ready) = &service.ready else { continue };
        if service.port.is_none() {
            return Err(Problem::invalid(param("port"), "`ready` asks on a port: give `port` too"));
        }
        let path = &ready.http;
        if !path.starts_with('/') || path.len() > 1024 || !path.bytes().all(|byte| byte.is_ascii_graphic()) {
            let message =
                "a path that is asked for begins with `/` and has at most 1024 printable characters, no spaces";
            return Err(Problem::invalid(param("ready.http"), message));
        }
    }
    Ok(())
}

impl From<Wrong> for Problem {
    fn from(wrong: Wrong) -> Self {
        let error = pepo_api::Error::new(ErrorCode::Invalid, wrong.message).param(wrong.param);
        Problem::from(match wrong.hint {
            Some(hint) => error.hint(hint),
            None => error,
        })
    }
}

fn within(param: &str, value: u32, range: &std::ops::RangeInclusive<u32>) -> Result<u32, Problem> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(Problem::invalid(param, format!("{param} is {value}; it must be from {} to {}", range.start(), range.end())))
}

/// A number of seconds up to ten years.
fn bounded(param: &str, value: u64, least: u64) -> Result<u64, Problem> {
    const MOST: u64 = 10 * 365 * 86_400;
    if (least..=MOST).contains(&value) {
        return Ok(value);
    }
    Err(Problem::invalid(param, format!("{param} is {value}; it must be from {least} to {MOST}")))
}

fn expiry(seconds: u64) -> Option<jiff::Timestamp> {
    crate::store::now().checked_add(jiff::SignedDuration::from_secs(seconds as i64)).ok()
}

const SLUG: &str = "at most 63 of a-z, 0-9, `-`, `_`, `.`, beginning and ending with a letter or digit";

fn is_slug(name: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_' | b'.');
    let outer = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let bytes = name.as_bytes();
    bytes.len() <= 63
        && outer(bytes.first().copied())
        && outer(bytes.last().copied())
        && bytes.iter().all(|b| inner(*b))
}

pub(super) fn check_name(name: &str) -> Result<(), Problem> {
    if is_slug(name) && !name.starts_with("ses_") && name != "by-key" {
        return Ok(());
    }
    Err(Problem::invalid("name", format!("the name of a Session: {SLUG}; not like an id, and not `by-key`")))
}

/// What can be the name or id of an Image.
pub(super) fn check_image(param: &str, image: Option<&str>) -> Result<(), Problem> {
    let wrong = |image: &str| image.is_empty() || image.len() > 128 || image.chars().any(char::is_control);
    match image.is_some_and(wrong) {
        true => Err(Problem::invalid(param, "an Image's name or id has 1 to 128 bytes and no control characters")),
        false => Ok(()),
    }
}

pub(super) fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), Problem> {
    if labels.len() > 64 {
        return Err(Problem::invalid("labels", format!("{} labels; at most 64", labels.len())));
    }
    for (key, value) in labels {
        if key.is_empty() || key.len() > 63 || key.contains('=') || key.chars().any(char::is_control) {
            return Err(Problem::invalid(
                "labels",
                "a label's key has 1 to 63 bytes, without `=` and control characters",
            ));
        }
        if value.len() > 256 || value.chars().any(char::is_control) {
            let message =
                format!("the label `{}` has a value over 256 bytes or with control characters", key.escape_debug());
            return Err(Problem::invalid("labels", message));
        }
    }
    Ok(())
}

/// An environment that fits into one message to the guest.
pub(super) fn check_env(param: &str, env: &BTreeMap<String, String>) -> Result<(), Problem> {
    const MOST: usize = 48 * 1024;
    for (name, value) in env {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            let message = format!("`{}` is not a variable: no empty name, no `=` in it, no NUL", name.escape_debug());
            return Err(Problem::invalid(param, message));
        }
    }
    let bytes: usize = env.iter().map(|(name, value)| name.len() + value.len() + 8).sum();
    if bytes > MOST {
        return Err(Problem::invalid(param, format!("the environment has {bytes} bytes; at most {MOST}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_slugs_and_no_ids() {
        for good in ["a", "web-1", "a_b.c", "7"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a b", "ses_01", "by-key", "ü", &"a".repeat(64)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn keys_fit_into_a_path() {
        for good in ["a", "user:42", "Größe", "a b", &"k".repeat(128)] {
            assert!(check_key(good).is_ok(), "{good}");
        }
        for bad in ["", "a/b", "..", ".", "a\n", &"k".repeat(129)] {
            assert!(check_key(bad).is_err(), "{bad:?}");
        }
    }

    fn services(json: serde_json::Value) -> Result<(), String> {
        let services: Vec<ServiceSpec> = serde_json::from_value(json).expect("services");
        check_services(&services).map_err(|problem| problem.0.param.unwrap_or_default())
    }

    #[test]
    fn what_is_wrong_with_a_service_is_named() {
        use serde_json::json;
        let good = json!([
            {"name": "web", "command": "npm run dev", "port": 3000, "ready": {"http": "/"}, "restart": "on-failure"},
            {"name": "worker", "command": "x", "restart": "always"}
        ]);
        assert_eq!(services(good), Ok(()));
        for (bad, param) in [
            (json!([{"name": "No", "command": "x"}]), "services[0].name"),
            (json!([{"name": "cmd_1", "command": "x"}]), "services[0].name"),
            (json!([{"name": "a", "command": "x"}, {"name": "a", "command": "y"}]), "services[1].name"),
            (json!([{"name": "a", "command": ""}]), "services[0].command"),
            (json!([{"name": "a", "command": "x", "port": 0}]), "services[0].port"),
            (json!([{"name": "a", "command": "x", "ready": {"http": "/"}}]), "services[0].port"),
            (json!([{"name": "a", "command": "x", "port": 1, "ready": {"http": "x y"}}]), "services[0].ready.http"),
        ] {
            assert_eq!(services(bad.clone()).err().as_deref(), Some(param), "{bad}");
        }
        let many: Vec<_> = (0..17).map(|n| json!({"name": format!("s{n}"), "command": "x"})).collect();
        assert_eq!(services(json!(many)).err().as_deref(), Some("services"));
    }
}

//! What people say about the network, made into what the engine takes: entries and presets into rules, its errors into
//! words that name the entry and why.
//!
//! A Session keeps what was said (presets by name); what that means is worked out at each activation and change.

mod counts;
pub mod floor;
mod reach;

use pepo_api::{NetworkMode, NetworkProtocol, NetworkRule, NetworkSpec};
use pepo_sandbox::net::policy::{self, Error};
use pepo_sandbox::net::{Cidr, Mode, Pattern, Policy, Protocol, Rule, Settings, Target};

use crate::preset::Presets;

pub use counts::Counts;
pub use reach::Reach;

/// What this instance says about the network. Absent where Sandboxes have none.
#[derive(Clone, Debug)]
pub struct Network {
    /// The floor and the bounds.
    pub settings: Settings,
    /// The kind of policy of a Session that names none.
    pub default: NetworkMode,
    /// Lists of entries by name.
    pub presets: Presets,
}

/// What is wrong with what was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// Which field.
    pub param: String,
    /// What is wrong with it.
    pub message: String,
    /// What to do.
    pub hint: Option<String>,
}

impl Wrong {
    fn new(param: impl Into<String>, message: impl Into<String>) -> Self {
        Wrong { param: param.into(), message: message.into(), hint: None }
    }

    fn hint(self, hint: impl Into<String>) -> Self {
        Wrong { hint: Some(hint.into()), ..self }
    }
}

/// Makes a policy of what was said. Without a network there is only `none`.
///
/// # Errors
/// Which field, and what is wrong with it.
pub fn policy(network: Option<&Network>, spec: &NetworkSpec) -> Result<Policy, Wrong> {
    let Some(network) = network else {
        return match spec {
            NetworkSpec { mode: NetworkMode::None, allow: None, .. } => Ok(Policy::default()),
            _ => Err(Wrong::new("network.mode", "this host gives Sandboxes no network interface; use `none`")
                .hint("`pepo doctor` says why; network.mode = \"on\" in pepo.toml insists on one")),
        };
    };
    let entries = spec.allow.as_deref().unwrap_or_default();
    let mut rules = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let place = u16::try_from(index).map_err(|_| too_many())?;
        match &entry.preset {
            None => rules.push(rule(entry, place).map_err(|wrong| within(index, wrong))?),
            Some(name) => rules.extend(preset(network, name, entry, place).map_err(|wrong| within(index, wrong))?),
        }
        if rules.len() > policy::RULES {
            return Err(too_many());
        }
    }
    let mode = match spec.mode {
        NetworkMode::None => Mode::None,
        NetworkMode::Public => Mode::Public,
        NetworkMode::Allow => Mode::Allow,
    };
    if spec.mode == NetworkMode::Allow && spec.allow.is_none() {
        return Err(Wrong::new(
            "network.allow",
            "the mode `allow` takes a list of what is open; an empty one opens nothing",
        ));
    }
    let policy = Policy {
        mode,
        rules,
        egress_bytes_per_second: spec.egress_bytes_per_second,
        ingress_bytes_per_second: spec.ingress_bytes_per_second,
    };
    policy.check(&network.settings.floor).map_err(|error| told(&error))?;
    Ok(policy)
}

fn too_many() -> Wrong {
    Wrong::new("network.allow", format!("over {} entries, those of presets counted", policy::RULES))
}

fn within(index: usize, wrong: Wrong) -> Wrong {
    let param = if wrong.param.is_empty() { String::new() } else { format!(".{}", wrong.param) };
    Wrong { param: format!("network.allow[{index}]{param}"), ..wrong }
}

fn told(error: &Error) -> Wrong {
    let message = error.to_string();
    match error {
        Error::Floor { entry, range, .. } => Wrong::new(format!("network.allow[{entry}].cidr"), message).hint(format!(
            "no App can open what is on the floor; the operator can: network.open = \"{range}\" in pepo.toml"
        )),
        Error::Entry { entry, .. } => Wrong::new(format!("network.allow[{entry}]"), message),
        Error::Cidr { .. } | Error::Whole(_) => Wrong::new("network", message),
    }
}

fn rule(entry: &NetworkRule, place: u16) -> Result<Rule, Wrong> {
    let NetworkRule { domain, cidr, preset: _, ports, protocol, any_protocol } = entry;
    let target = match (domain, cidr) {
        (Some(domain), None) => {
            Target::Domain(domain.parse::<Pattern>().map_err(|error| Wrong::new("domain", error.to_string()))?)
        }
        (None, Some(cidr)) => {
            Target::Cidr(cidr.parse::<Cidr>().map_err(|error| Wrong::new("cidr", error.to_string()))?)
        }
        _ => return Err(Wrong::new("", "an entry has exactly one of `domain`, `cidr` and `preset`")),
    };
    let protocol = protocol.map(|protocol| match protocol {
        NetworkProtocol::Tcp => Protocol::Tcp,
        NetworkProtocol::Udp => Protocol::Udp,
        NetworkProtocol::Icmp => Protocol::Icmp,
    });
    Ok(Rule { entry: place, target, protocol, ports: ports.clone(), any_protocol: *any_protocol, public: false })
}

fn preset(network: &Network, name: &str, entry: &NetworkRule, place: u16) -> Result<Vec<Rule>, Wrong> {
    let plain = NetworkRule { preset: Some(name.to_owned()), ..NetworkRule::default() };
    if *entry != plain {
        return Err(Wrong::new("preset", format!("`{name}` says itself what it opens; leave everything else away")));
    }
    let Some(preset) = network.presets.get(name) else {
        return Err(Wrong::new("preset", network.presets.missing(name)));
    };
    let rule = |entry: &crate::preset::Entry| {
        let (target, ports) = (entry.target.clone(), entry.ports.clone());
        Rule { entry: place, target, protocol: None, ports, any_protocol: false, public: false }
    };
    Ok(preset.entries.iter().map(rule).collect())
}

/// What of a Session's policy opens more than it seems to.
pub fn notes(spec: &NetworkSpec) -> Vec<String> {
    let entries = spec.allow.as_deref().unwrap_or_default();
    let wide = entries.iter().enumerate().filter(|(_, entry)| entry.any_protocol);
    wide.map(|(index, entry)| {
        let name = entry.domain.as_deref().unwrap_or_default();
        format!(
            "entry {index} ({name}) is address-wide: its ports are open to whatever answers at the name's addresses"
        )
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network() -> Network {
        let ours = ["forge.example.org", "*.forge.example.org"].map(str::to_owned).to_vec();
        let presets = Presets::new(Default::default(), &[("forge".to_owned(), ours)].into()).expect("presets");
        Network { settings: Settings::default(), default: NetworkMode::Public, presets }
    }

    fn read(json: &str) -> Result<Policy, Wrong> {
        policy(Some(&network()), &serde_json::from_str(json).expect("json"))
    }

    #[test]
    fn errors_name_the_entry_and_why() {
        let wrong = |json: &str| {
            let Wrong { param, message, hint } = read(json).expect_err(json);
            (param, message, hint)
        };
        assert_eq!(
            wrong(r#"{"mode": "allow", "allow": [{"domain": "example.com"}, {"cidr": "10.1.0.0/16"}]}"#),
            (
                "network.allow[1].cidr".to_owned(),
                "entry 1: 10.1.0.0/16 is on the floor (private networks, 10.0.0.0/8)".to_owned(),
                Some(
                    "no App can open what is on the floor; the operator can: network.open = \"10.1.0.0/16\" in pepo.toml"
                        .to_owned()
                )
            )
        );
        assert_eq!(
            wrong(r#"{"mode": "allow", "allow": [{"preset": "forges"}]}"#),
            (
                "network.allow[0].preset".to_owned(),
                "there is no preset `forges`; did you mean `forge`?".to_owned(),
                None
            )
        );
        assert_eq!(
            wrong(r#"{"mode": "allow", "allow": [{"domain": "a.example.com", "cidr": "1.2.3.4"}]}"#),
            (
                "network.allow[0]".to_owned(),
                "an entry has exactly one of `domain`, `cidr` and `preset`".to_owned(),
                None
            )
        );
        assert_eq!(wrong(r#"{"mode": "allow"}"#).0, "network.allow");
        assert_eq!(
            wrong(r#"{"mode": "allow", "allow": [{"preset": "forge", "ports": [22]}]}"#).0,
            "network.allow[0].preset"
        );
        assert_eq!(wrong(r#"{"mode": "allow", "allow": [{"domain": "*.com"}]}"#).0, "network.allow[0].domain");
        assert_eq!(wrong(r#"{"mode": "none", "allow": [{"cidr": "1.2.3.4"}]}"#).0, "network");
    }

    #[test]
    fn presets_are_written_out_and_keep_their_place() {
        let policy = read(r#"{"mode": "allow", "allow": [{"cidr": "1.2.3.4"}, {"preset": "forge"}]}"#).expect("policy");
        assert_eq!(policy.rules.iter().map(|rule| rule.entry).collect::<Vec<_>>(), [0, 1, 1]);
        assert_eq!(read(r#"{"mode": "public"}"#).expect("public"), Policy::public());
    }

    #[test]
    fn without_a_network_there_is_only_none() {
        let spec = |mode| NetworkSpec { mode, ..NetworkSpec::default() };
        assert_eq!(policy(None, &spec(NetworkMode::None)), Ok(Policy::default()));
        let wrong = policy(None, &spec(NetworkMode::Public)).expect_err("public");
        assert_eq!(wrong.message, "this host gives Sandboxes no network interface; use `none`");
    }

    #[test]
    fn what_is_address_wide_is_said() {
        let json = r#"{"mode": "allow", "allow": [{"domain": "a.example.com"},
            {"domain": "db.example.com", "ports": [5432], "any_protocol": true}]}"#;
        read(json).expect("policy");
        assert_eq!(
            notes(&serde_json::from_str(json).expect("json")),
            [
                "entry 1 (db.example.com) is address-wide: its ports are open to whatever answers at the name's addresses"
            ]
        );
    }
}

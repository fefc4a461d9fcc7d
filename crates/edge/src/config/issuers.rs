//! `[issuers.NAME]`: whose tokens are taken, and what they give.

use std::path::PathBuf;
use std::time::Duration;

use jsonwebtoken::Algorithm;
use pepo_api::Scope;

use super::duration;
use crate::fetch::Place;

/// What an issuer may not be trusted with longer than.
const LONGEST_LEEWAY: Duration = Duration::from_secs(300);

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issuer {
    /// Its name in logs.
    pub name: String,
    /// The claim `iss`, to the letter.
    pub issuer: String,
    /// What the claim `aud` must have one of.
    pub audiences: Vec<String>,
    /// Where its keys are; none: its settings say so.
    pub keys: Option<Place>,
    /// Who vouches for that place, instead of the system's authorities.
    pub authorities: Option<PathBuf>,
    /// What may sign.
    pub algorithms: Vec<Algorithm>,
    /// How far clocks may differ.
    pub leeway: Duration,
    /// The Apps that its tokens can be for. With `app_claim` the token picks one of them, of all where there are none.
    pub app: Vec<String>,
    /// The claim that names the App.
    pub app_claim: Option<String>,
    /// The most that a token gives; without `scope_claim` what each gives.
    pub scopes: Vec<Scope>,
    /// The claim that lists scopes.
    pub scope_claim: Option<String>,
    /// What stands before ours there.
    pub scope_prefix: String,
    /// The claim that the log names a caller by.
    pub subject_claim: String,
}

/// Reads the section.
///
/// # Errors
/// The setting, and what is wrong with it.
pub fn read(section: &toml::Value) -> Result<Vec<Issuer>, (String, String)> {
    let all = section.as_table().ok_or_else(|| ("issuers".to_owned(), "expected [issuers.NAME]".to_owned()))?;
    let issuers: Vec<_> = all.iter().map(|(name, value)| one(name, value)).collect::<Result<_, _>>()?;
    for (n, issuer) in issuers.iter().enumerate() {
        if issuers.iter().take(n).any(|other| other.issuer == issuer.issuer) {
            let message = format!("`{}` is there twice: a token could not tell which is meant", issuer.issuer);
            return Err((format!("issuers.{}.issuer", issuer.name), message));
        }
    }
    Ok(issuers)
}

fn one(name: &str, value: &toml::Value) -> Result<Issuer, (String, String)> {
    let at = |key: &str| format!("issuers.{name}.{key}");
    let plain = !name.is_empty() && name.len() <= 30 && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    let keys = value.as_table().filter(|_| plain).ok_or_else(|| {
        (format!("issuers.{name}"), "expected a table whose name has at most 30 letters, digits and -".to_owned())
    })?;
    const KNOWN: &[&str] = &[
        "issuer",
        "audience",
        "keys",
        "authorities",
        "algorithms",
        "leeway",
        "app",
        "app_claim",
        "scopes",
        "scope_claim",
        "scope_prefix",
        "subject_claim",
    ];
    if let Some(odd) = keys.keys().find(|key| !KNOWN.contains(&key.as_str())) {
        return Err((at(odd), format!("there is no such setting; there are {}", KNOWN.join(", "))));
    }
    let list = |key: &str| -> Result<Vec<String>, (String, String)> {
        let wrong = || (at(key), "expected a text or a list of texts".to_owned());
        match keys.get(key) {
            None => Ok(vec![]),
            Some(toml::Value::String(text)) => {
                Ok(text.split(',').map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect())
            }
            Some(toml::Value::Array(all)) => {
                all.iter().map(|one| one.as_str().map(str::to_owned).ok_or_else(wrong)).collect()
            }
            Some(_) => Err(wrong()),
        }
    };
    let text = |key: &str| -> Result<Option<String>, (String, String)> {
        match keys.get(key) {
            None => Ok(None),
            Some(toml::Value::String(text)) if !text.is_empty() => Ok(Some(text.clone())),
            Some(_) => Err((at(key), "expected a text".to_owned())),
        }
    };
    let needed = |key: &str| text(key)?.ok_or_else(|| (at(key), "must be set".to_owned()));
    let refuse = |key: &'static str| move |reason: String| (format!("issuers.{name}.{key}"), reason);

    let issuer = needed("issuer")?;
    let audiences = list("audience")?;
    if audiences.is_empty() {
        return Err((at("audience"), "must be set: without it a token for anybody would count here".into()));
    }
    let keys_at = text("keys")?.map(|text| Place::read(&text)).transpose().map_err(refuse("keys"))?;
    if keys_at.is_none() {
        Place::read(&issuer).map_err(|_| (at("keys"), "must be set where the issuer is no https URL".into()))?;
    }
    let algorithms = match list("algorithms")? {
        none if none.is_empty() => vec![Algorithm::RS256, Algorithm::ES256],
        names => names.iter().map(|name| algorithm(name)).collect::<Result<_, _>>().map_err(refuse("algorithms"))?,
    };
    let leeway = match keys.get("leeway") {
        None => Duration::from_secs(30),
        Some(toml::Value::Integer(seconds)) => Duration::from_secs(u64::try_from(*seconds).unwrap_or(u64::MAX)),
        Some(_) => duration(&needed("leeway")?).map_err(refuse("leeway"))?,
    };
    if leeway > LONGEST_LEEWAY {
        return Err((at("leeway"), format!("at most {} s", LONGEST_LEEWAY.as_secs())));
    }
    let (app, app_claim) = (list("app")?, text("app_claim")?);
    if app_claim.is_none() && app.len() != 1 {
        return Err((at("app"), "must name one App, or app_claim must say where the token names it".into()));
    }
    let scopes: Vec<Scope> = list("scopes")?
        .iter()
        .map(|scope| scope.parse().map_err(|error: pepo_api::ScopeError| (at("scopes"), error.to_string())))
        .collect::<Result<_, _>>()?;
    if scopes.is_empty() {
        return Err((at("scopes"), "must be set: the most that a token gives, as sessions:*, commands:*".into()));
    }
    Ok(Issuer {
        name: name.to_owned(),
        issuer,
        audiences,
        keys: keys_at,
        authorities: text("authorities")?.map(PathBuf::from),
        algorithms,
        leeway,
        app,
        app_claim,
        scopes,
        scope_claim: text("scope_claim")?,
        scope_prefix: match keys.get("scope_prefix") {
            Some(toml::Value::String(text)) => text.clone(),
            None => String::new(),
            Some(_) => return Err((at("scope_prefix"), "expected a text".into())),
        },
        subject_claim: text("subject_claim")?.unwrap_or_else(|| "sub".into()),
    })
}

/// Public-key algorithms alone: with a shared secret whoever checks could sign too.
fn algorithm(name: &str) -> Result<Algorithm, String> {
    const KNOWN: &[&str] = &["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA"];
    let known = KNOWN.contains(&name).then(|| name.parse().ok()).flatten();
    known.ok_or_else(|| format!("`{name}` is not one of {}", KNOWN.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(text: &str) -> Result<Vec<Issuer>, (String, String)> {
        read(&toml::Value::Table(text.parse().expect("toml")))
    }

    const CORP: &str = r#"
        [corp]
        issuer = "https://id.example.com"
        audience = "pepo"
        app = "shop"
        scopes = "sessions:*, commands:*"
    "#;

    #[test]
    fn an_issuer_is_read_with_its_defaults() {
        let issuer = section(CORP).expect("issuer").remove(0);
        assert_eq!((issuer.name.as_str(), issuer.audiences.as_slice()), ("corp", &["pepo".to_owned()][..]));
        assert_eq!(issuer.algorithms, [Algorithm::RS256, Algorithm::ES256]);
        assert_eq!((issuer.leeway, issuer.subject_claim.as_str()), (Duration::from_secs(30), "sub"));
        assert_eq!(issuer.scopes.len(), 2);
        let more = format!(
            "{CORP}\nalgorithms = [\"EdDSA\"]\nleeway = \"1m\"\nkeys = \"/etc/keys.json\"\nscope_claim = \"scp\""
        );
        let issuer = section(&more).expect("issuer").remove(0);
        assert_eq!((issuer.algorithms, issuer.leeway), (vec![Algorithm::EdDSA], Duration::from_secs(60)));
    }

    #[test]
    fn what_would_let_too_many_in_is_refused() {
        let refused = |text: &str| section(text).expect_err(text);
        for algorithm in ["HS256", "none", "ES512", "rs256"] {
            let (at, why) = refused(&format!("{CORP}\nalgorithms = \"{algorithm}\""));
            assert!(at.ends_with("corp.algorithms") && why.contains("RS256"), "{why}");
        }
        let without = |line: &str| {
            let kept: String =
                CORP.lines().filter(|kept| !kept.trim().starts_with(line)).map(|l| format!("{l}\n")).collect();
            refused(&kept).0
        };
        for key in ["issuer", "audience", "app", "scopes"] {
            assert!(without(key).ends_with(key), "{key}");
        }
        assert!(refused(&format!("{CORP}\nleeway = \"1h\"")).0.ends_with("leeway"));
        assert!(refused(&format!("{CORP}\nkeys = \"http://id.example.com/keys\"")).1.contains("https"));
        assert!(refused(&format!("{CORP}\naudiences = \"x\"")).1.contains("audience"));
        assert!(refused(&format!("{CORP}\n{}", CORP.replace("corp", "again"))).1.contains("twice"));
        assert!(refused(&CORP.replace("[corp]", "[\"a b\"]")).1.contains("letters"));
    }
}

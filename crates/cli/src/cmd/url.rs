//! `pepo url`: where a program in a Session answers over HTTP, and for how long whom.

use std::fs;

use clap::Args;
use pepo_api::query::ShowSession;
use pepo_api::{CreateToken, Scope, SessionId};
use serde::Serialize;

use crate::fail::{Failure, Outcome};
use crate::place::{Instance, Place};
use crate::{render, value};

#[derive(Debug, Args)]
#[command(after_help = "The address takes any credential that may connect to ports, in `Authorization: Bearer …`.")]
pub struct Url {
    /// Also a token for this one port, valid that long, at most 1h (a bare number is seconds)
    #[arg(long, value_name = "TIME", value_parser = value::seconds)]
    expires: Option<u64>,
    /// For anybody who has the address
    #[arg(long)]
    public: bool,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// The Session, by id or name
    #[arg(value_name = "SES")]
    session: String,
    /// The port in it
    #[arg(value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
}

#[derive(Serialize)]
struct Told {
    url: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<jiff::Timestamp>,
}

impl Url {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        if self.public {
            // A page of a guest on the API's own address would speak for whoever looks at it.
            return Err(Failure::new("--public does not exist in this release: every request needs a credential")
                .hint("`--expires 1h` makes a token for this one port, to be sent as `Authorization: Bearer …`"));
        }
        let client = place.client();
        let session = client.session_show(&self.session, &ShowSession::default()).await?.id;
        let base = match &place {
            Place::Remote(client) => client.at(),
            Place::Local(instance) => here(instance).await?,
        };
        let token = match self.expires {
            None => None,
            Some(seconds) => {
                let scopes: Vec<Scope> = vec!["ports:connect".parse().map_err(Failure::new)?];
                let wanted = CreateToken { scopes, port: Some(self.port), expires_seconds: Some(seconds) };
                Some(client.token_create(&session.to_string(), &wanted).await?)
            }
        };
        let told = Told {
            url: address(&base, session, self.port),
            expires_at: token.as_ref().map(|token| token.expires_at),
            token: token.map(|token| token.token),
        };
        if self.json {
            render::json(&told)?;
            return Ok(0);
        }
        render::say(&told.url)?;
        if let (Some(token), Some(at)) = (&told.token, told.expires_at) {
            render::say(&format!("Authorization: Bearer {token}"))?;
            crate::fail::note(format!("the token is for port {} alone and ends at {}", self.port, render::time(at)));
        }
        Ok(0)
    }
}

fn address(base: &str, session: SessionId, port: u16) -> String {
    format!("{base}/v1/sessions/{session}/ports/{port}/")
}

/// Where the edge of this instance listens.
async fn here(instance: &Instance) -> Outcome<String> {
    if let Ok(url) = fs::read_to_string(instance.run_directory().join("url")) {
        return Ok(url.trim().to_owned());
    }
    // The system's instance has its address from its settings.
    let settings = instance.client().config_show().await?.settings;
    let text = |name: &str| settings.get(name).and_then(|(value, _)| value.as_str()).unwrap_or_default();
    let scheme = if text("edge.certificate").is_empty() { "http" } else { "https" };
    Ok(format!("{scheme}://{}", text("edge.listen")))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn an_address_names_the_session_by_its_id() {
        let session = SessionId::generate();
        let told = address("http://127.0.0.1:7070", session, 3000);
        assert_eq!(told, format!("http://127.0.0.1:7070/v1/sessions/{session}/ports/3000/"));
    }

    #[test]
    fn a_port_is_a_port() {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            url: Url,
        }
        let line = |port| Line::try_parse_from(["url", "--expires", "1h", "web", port]);
        let url = line("3000").map(|line| line.url).unwrap();
        assert_eq!((url.port, url.expires), (3000, Some(3600)));
        for wrong in ["0", "65536", "x", "-1"] {
            assert!(line(wrong).is_err(), "{wrong}");
        }
    }
}

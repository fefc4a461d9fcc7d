//! `pepo url`: where a program in a Session answers over HTTP, and for how long whom.

use std::fs;

use clap::Args;
use pepo_api::query::ShowSession;
use pepo_api::{CreateToken, Domain, PortName, PublishPort, Scope, SessionId};
use serde::Serialize;

use crate::fail::{self, Failure, Outcome};
use crate::place::{Instance, Place};
use crate::{render, value};

#[derive(Debug, Args)]
#[command(
    after_help = "The address takes any credential that may connect to ports, in `Authorization: Bearer …`; a published one takes none."
)]
pub struct Url {
    /// Also a token for this one port, valid that long, at most 1h (a bare number is seconds); with --public: how long anybody may come, 1h where it is not said, at most 7d
    #[arg(long, value_name = "TIME", value_parser = value::seconds, conflicts_with = "withdraw")]
    expires: Option<u64>,
    /// Publish it: anybody who has the address may come
    #[arg(long, conflicts_with = "withdraw")]
    public: bool,
    /// Publish it no more, at once
    #[arg(long)]
    withdraw: bool,
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
    /// Anybody may come.
    public: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<jiff::Timestamp>,
}

impl Url {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let client = place.client();
        let session = client.session_show(&self.session, &ShowSession::default()).await?.id;
        let base = match &place {
            Place::Remote(client) => client.at(),
            Place::Local(instance) => here(instance).await?,
        };
        if self.withdraw {
            client.port_withdraw(&session.to_string(), self.port).await?;
            if !self.json {
                fail::note(format!("port {} takes a credential again", self.port));
                return Ok(0);
            }
        }
        let published = match self.public {
            true => {
                let wanted = PublishPort { expires_seconds: self.expires };
                Some(client.port_publish(&session.to_string(), self.port, &wanted).await?)
            }
            false => None,
        };
        let token = match self.expires {
            None => None,
            Some(_) if self.public => None,
            Some(seconds) => {
                let scopes: Vec<Scope> = vec!["ports:connect".parse().map_err(Failure::new)?];
                let wanted = CreateToken { scopes, port: Some(self.port), expires_seconds: Some(seconds) };
                Some(client.token_create(&session.to_string(), &wanted).await?)
            }
        };
        let url = match &published {
            Some(published) => of_host(&base, &published.host),
            None => {
                let domain = client.version().await?.domain.and_then(|domain| domain.parse().ok());
                address(&base, domain.as_ref(), session, self.port)
            }
        };
        let ends = token.as_ref().map(|token| token.expires_at);
        let told = Told {
            url,
            public: published.is_some(),
            expires_at: published.as_ref().map(|published| published.expires_at).or(ends),
            token: token.map(|token| token.token),
        };
        if self.json {
            render::json(&told)?;
            return Ok(0);
        }
        render::say(&told.url)?;
        if let (Some(token), Some(at)) = (&told.token, told.expires_at) {
            render::say(&format!("Authorization: Bearer {token}"))?;
            fail::note(format!("the token is for port {} alone and ends at {}", self.port, render::time(at)));
        }
        if let (true, Some(at)) = (told.public, told.expires_at) {
            fail::note(format!(
                "whoever has this address reaches port {} until {}; `pepo url {} {} --withdraw` ends that",
                self.port,
                render::time(at),
                self.session,
                self.port
            ));
        }
        Ok(0)
    }
}

/// The port's own host name, where ports have some; else its path on the API.
fn address(base: &str, domain: Option<&Domain>, session: SessionId, port: u16) -> String {
    match domain {
        Some(domain) => of_host(base, &domain.name(PortName { session, port })),
        None => format!("{base}/v1/sessions/{session}/ports/{port}/"),
    }
}

/// That host, with the scheme and the port by which the edge is reached from here.
fn of_host(base: &str, host: &str) -> String {
    let (scheme, authority) = base.split_once("://").unwrap_or(("http", base));
    let authority = authority.split('/').next().unwrap_or_default();
    // What follows the last colon is the port, but for an address in brackets without one.
    let port = authority.rsplit_once(':').map(|(_, port)| port).filter(|port| !port.contains(']'));
    format!("{scheme}://{host}{}/", port.map(|port| format!(":{port}")).unwrap_or_default())
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
        let told = address("http://127.0.0.1:7070", None, session, 3000);
        assert_eq!(told, format!("http://127.0.0.1:7070/v1/sessions/{session}/ports/3000/"));
    }

    #[test]
    fn a_host_name_is_reached_as_the_edge_is() {
        let session = SessionId::generate();
        let domain: Domain = "preview.example.com".parse().unwrap();
        let own = format!("3000-{}.preview.example.com", session.hex());
        for (base, wanted) in [
            ("http://127.0.0.1:7070", format!("http://{own}:7070/")),
            ("https://pepo.example.com", format!("https://{own}/")),
            ("https://[::1]:7443", format!("https://{own}:7443/")),
            ("https://[::1]", format!("https://{own}/")),
        ] {
            assert_eq!(address(base, Some(&domain), session, 3000), wanted, "{base}");
        }
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
        let with = |flags: &[&str]| {
            let line = [&["url"], flags, &["web", "3000"]].concat();
            Line::try_parse_from(line).map(|line| line.url)
        };
        let public = with(&["--public", "--expires", "7d"]).unwrap();
        assert_eq!((public.public, public.expires), (true, Some(7 * 86_400)));
        assert!(with(&["--withdraw"]).unwrap().withdraw);
        assert!(with(&["--withdraw", "--public"]).is_err() && with(&["--withdraw", "--expires", "1h"]).is_err());
        for wrong in ["0", "65536", "x", "-1"] {
            assert!(line(wrong).is_err(), "{wrong}");
        }
    }
}

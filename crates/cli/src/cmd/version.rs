//! `pepo version`: this program's, and the daemon's or `pepod`'s beside it.

use clap::Args;
use pepo_api::Version as Report;
use pepo_api::client::ClientError;
use serde::Serialize;

use crate::fail::Outcome;
use crate::place::Place;
use crate::{render, tool};

#[derive(Debug, Args)]
pub struct Version {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Both {
    pepo: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    daemon: Option<Report>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Version {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let found: Outcome<Report> = match place.client().version().await {
            Ok(report) => Ok(report),
            Err(error) => match (&place, error) {
                (Place::Local(instance), ClientError::NoDaemon { .. } | ClientError::NotAllowed { .. }) => {
                    tool::ask(instance, &["version", "--json"]).await
                }
                (_, error) => Err(error.into()),
            },
        };
        let (daemon, error) = match found {
            Ok(report) => (Some(report), None),
            Err(failure) => (None, Some(failure.message().to_owned())),
        };
        let both = Both { pepo: env!("CARGO_PKG_VERSION"), daemon, error };
        if self.json {
            render::json(&both)?;
            return Ok(0);
        }
        let mut pairs = vec![("pepo", both.pepo.to_owned())];
        match (&both.daemon, &both.error) {
            (Some(daemon), _) => pairs.extend([
                ("pepod", daemon.version.clone()),
                (
                    "guest",
                    daemon
                        .guest_digest
                        .as_deref()
                        .map_or_else(String::new, |d| format!("generation {}, sha256:{d}", daemon.guest_generation)),
                ),
                ("runs on", daemon.runs_on.clone()),
                ("tag", daemon.tag.clone().unwrap_or_default()),
            ]),
            (None, error) => pairs.push(("pepod", error.clone().unwrap_or_default())),
        }
        render::out(&render::fields(&pairs))?;
        Ok(0)
    }
}

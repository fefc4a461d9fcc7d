//! `pepo config …`. Settings are `pepod`'s; this asks the daemon, or `pepod` itself.

use clap::{Args, Subcommand};
use pepo_api::ConfigShown;
use pepo_api::client::ClientError;

use crate::fail::Outcome;
use crate::place::Place;
use crate::{render, tool};

#[derive(Debug, Subcommand)]
pub enum Config {
    /// Check the file, the environment and their values
    Check,
    /// Show every setting, its value and where that came from
    Show(Show),
    /// Print a file with every setting and its default
    Default,
}

#[derive(Debug, Args)]
pub struct Show {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Config {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let instance = place.local("config")?;
        match self {
            Config::Check => match tool::pass(&instance, &["config", "check"]).await? {
                // Certificates and identity providers are the edge's to judge.
                0 => tool::pass_to(&instance, "pepo-edge", &["--check"]).await,
                wrong => Ok(wrong),
            },
            Config::Default => tool::pass(&instance, &["config", "default"]).await,
            Config::Show(show) => {
                let shown: ConfigShown = match instance.client().config_show().await {
                    Ok(shown) => shown,
                    Err(ClientError::NoDaemon { .. }) => tool::ask(&instance, &["config", "show", "--json"]).await?,
                    Err(error) => return Err(error.into()),
                };
                if show.json {
                    render::json(&shown)?
                } else {
                    render::out(&text(&shown))?
                }
                Ok(0)
            }
        }
    }
}

fn text(shown: &ConfigShown) -> String {
    let rows: Vec<_> = shown
        .settings
        .iter()
        .map(|(name, (value, origin))| {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            vec![name.clone(), value, origin.clone()]
        })
        .collect();
    render::table(&["SETTING", "VALUE", "FROM"], &rows)
}

//! `pepo port-forward`: a port here that leads to one in a Session. It listens on this machine's loopback alone.

use std::net::Ipv4Addr;

use clap::Args;
use pepo_api::client::Client;
use tokio::net::{TcpListener, TcpStream};

use crate::fail::{self, Failure, Outcome};
use crate::interrupt::Interrupts;
use crate::place::Place;
use crate::render;

#[derive(Debug, Args)]
pub struct Forward {
    /// The Session, by id or name
    #[arg(value_name = "SES")]
    session: String,
    /// The port in the Session, and before it the one here where that is another (0: any free one)
    #[arg(value_name = "[LOCAL:]REMOTE", value_parser = ports)]
    ports: Ports,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ports {
    local: u16,
    remote: u16,
}

fn ports(text: &str) -> Result<Ports, String> {
    let wrong = || format!("`{text}` is not a port, as 8080, or two, as 9000:8080");
    let number = |text: &str| text.parse::<u16>().map_err(|_| wrong());
    let ports = match text.split_once(':') {
        Some((local, remote)) => Ports { local: number(local)?, remote: number(remote)? },
        None => Ports { local: number(text)?, remote: number(text)? },
    };
    if ports.remote == 0 { Err(wrong()) } else { Ok(ports) }
}

impl Forward {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let client = place.client();
        // What is not there is told before anybody connects.
        client.session_show(&self.session, &Default::default()).await?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, self.ports.local))
            .await
            .map_err(|error| Failure::new(format!("cannot listen on 127.0.0.1:{}: {error}", self.ports.local)))?;
        let here = listener.local_addr().map_err(|error| Failure::new(format!("cannot listen: {error}")))?;
        render::say(&format!("{here} -> {}:{}", self.session, self.ports.remote))?;
        let mut interrupts = Interrupts::new()?;
        loop {
            let stream = tokio::select! {
                caught = interrupts.next() => match caught.ends() {
                    true => return Ok(caught.exit_code()),
                    false => continue,
                },
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        // Out of descriptors: those in use must come back first.
                        fail::note(format!("a connection could not be taken: {error}"));
                        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                        continue;
                    }
                },
            };
            tokio::spawn(carry(client.clone(), self.session.clone(), self.ports.remote, stream));
        }
    }
}

/// One connection. What goes wrong with it is told and ends nothing else.
async fn carry(client: Client, session: String, port: u16, mut here: TcpStream) {
    match client.dial(&session, port).await {
        Ok(mut there) => {
            // Either side may break off at any time; both are closed then.
            let _ = tokio::io::copy_bidirectional(&mut here, &mut there).await;
        }
        Err(error) => fail::note(Failure::from(error).message()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_port_or_two() {
        assert_eq!(ports("8080"), Ok(Ports { local: 8080, remote: 8080 }));
        assert_eq!(ports("0:80"), Ok(Ports { local: 0, remote: 80 }));
        for wrong in ["", "x", "0", "1:0", "1:2:3", "65536", ":80"] {
            assert!(ports(wrong).is_err(), "{wrong}");
        }
    }
}

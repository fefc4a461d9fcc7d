//! Ports by host names of their own, and strangers who open them where they are published.
//!
//! ```text
//! Host: 3000-{hex}.{domain}  ─►  /v1/sessions/ses_{hex}/ports/3000 + the path as it came  ─►  the port's row, as ever
//! ```
//! The answer's origin is the port's own, so nothing of the API is reachable by such a name, whatever the path. A name is
//! read before anything else is looked at: what is unknown, over, another App's or not published is refused alike.
//!
//! Strangers are bounded apart from those who have a credential: a share of each address, of each port, and of all of them
//! together, of requests a second and of requests at once. None of it comes out of an App's or a caller's share.

use std::any::Any as Held;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use http::{Uri, header};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use pepo_api::{Action, AppId, Bound, Domain, Named, PortName, Scope};

use crate::auth::{Caller, Who};
use crate::body::{self, Any};
use crate::keys::Keys;
use crate::net;
use crate::rate::{Buckets, Level, Open, Rate};

/// What the host is that a request names. One that names none names nothing of ours.
pub fn host(domain: &Domain, head: &Parts) -> Named {
    let named = head.uri.authority().map(|authority| authority.as_str().as_bytes());
    let named = named.or_else(|| head.headers.get(header::HOST).map(|host| host.as_bytes()));
    named.map_or(Named::Elsewhere, |host| domain.read(host))
}

/// Where on the API that is which a request to a port's own name asks for.
pub fn target(of: PortName, asked: &Uri) -> Option<Uri> {
    let path = asked.path_and_query().map_or("/", |both| both.as_str());
    let own = path.starts_with('/');
    format!("/v1/sessions/{}/ports/{}{path}", of.session, of.port).parse().ok().filter(|_| own)
}

/// Whoever asks for a published port and has nothing to show: they may connect to that port and do nothing else.
pub fn stranger(of: PortName, app: AppId) -> Caller {
    let connect: Vec<Scope> = Action::PortsConnect.word().parse().into_iter().collect();
    let bound = Some(Bound { session: of.session, port: Some(of.port) });
    Caller { app, who: Who::Stranger(of), scopes: connect.into(), bound }
}

/// What holds a place among what runs at once, until it is dropped.
pub type Turn = Box<dyn Held + Send + Sync>;

/// What strangers use up.
#[derive(Default)]
pub struct Strangers {
    addresses: Buckets<IpAddr>,
    ports: Buckets<PortName>,
    all: Buckets<()>,
    open_addresses: Open<IpAddr>,
    open_ports: Open<PortName>,
    open_all: Open<()>,
}

/// Whose share it is that is used up.
#[derive(Debug, PartialEq, Eq)]
pub struct Over {
    /// Whose, in a sentence.
    pub whose: &'static str,
    /// How much that share is.
    pub limit: u64,
    /// How it stands, where it fills again.
    pub level: Option<Level>,
}

impl Strangers {
    /// Takes one request out of the shares: half of a port's for one address, twice a port's for all of them.
    ///
    /// # Errors
    /// One of them is used up; what is taken first is an address's own, so one that floods takes nothing from others.
    pub fn take(&self, of: PortName, from: IpAddr, port: Rate) -> Result<Level, Over> {
        let over = |whose, rate: Rate| move |level| Over { whose, limit: rate.per_second, level: Some(level) };
        let address = Rate::of((port.per_second / 2).max(1));
        let level = self
            .addresses
            .take(net::neighbourhood(from), address)
            .map_err(over("one address of a published port", address))?;
        self.ports.take(of, port).map_err(over("strangers at one published port", port))?;
        let all = Rate::of(port.per_second.saturating_mul(2));
        self.all.take((), all).map_err(over("strangers at all published ports", all))?;
        Ok(level)
    }

    /// A place among the requests that run at once: half of what one caller may have for all strangers together, half of
    /// that for a port, and half of that for an address.
    ///
    /// # Errors
    /// There is none.
    pub fn enter(&self, of: PortName, from: IpAddr, streams: usize) -> Result<Turn, Over> {
        let over = |whose, limit: usize| move || Over { whose, limit: limit as u64, level: None };
        let part = |part: usize| (streams / part).max(1);
        let address = self.open_addresses.enter(net::neighbourhood(from), part(8));
        let address = address.ok_or_else(over("one address of published ports", part(8)))?;
        let port = self.open_ports.enter(of, part(4)).ok_or_else(over("strangers at one published port", part(4)))?;
        let all = self.open_all.enter((), part(2)).ok_or_else(over("strangers at all published ports", part(2)))?;
        Ok(Box::new((address, port, all)))
    }
}

/// Returns when that port is published no more. A copy that is too old to say ends nothing that runs; it lets nobody in.
pub async fn closed(keys: Arc<Keys>, of: PortName) {
    let mut moves = keys.moves();
    loop {
        let until = moves.borrow_and_update().as_ref().and_then(|copy| copy.published_until(of));
        let Some(left) = until.map(|until| until.duration_since(jiff::Timestamp::now())) else { return };
        let Ok(left) = left.try_into() else { return };
        tokio::select! {
            () = tokio::time::sleep(left) => return,
            moved = moves.changed() => if moved.is_err() { return },
        }
    }
}

/// A body that breaks off when the port is published no more.
pub fn while_published(body: Any, keys: Arc<Keys>, of: PortName) -> Any {
    While { body, closed: Box::pin(closed(keys, of)) }.boxed()
}

struct While {
    body: Any,
    closed: Pin<Box<dyn Future<Output = ()> + Send + Sync>>,
}

impl Body for While {
    type Data = Bytes;
    type Error = body::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, body::Error>>> {
        if self.closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(body::Error::Withdrawn)));
        }
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http::Request;
    use pepo_api::{Resource, SessionId, allow, route};

    use super::*;

    fn port(port: u16) -> PortName {
        PortName { session: SessionId::generate(), port }
    }

    #[test]
    fn the_whole_path_is_the_programs() {
        let of = port(80);
        let own = format!("/v1/sessions/{}/ports/80", of.session);
        for path in ["/", "/v1/sessions", "/healthz?x=/..", "//a//b", "/?", "/%2e%2e/x"] {
            let told = target(of, &path.parse().expect("uri")).expect("a target").to_string();
            assert_eq!(told, format!("{own}{path}"));
        }
        let with_authority = "https://x.example/a?b".parse().expect("uri");
        assert_eq!(target(of, &with_authority).expect("a target").to_string(), format!("{own}/a?b"));
        assert_eq!(target(of, &"*".parse().expect("uri")), None);
    }

    #[test]
    fn a_host_is_read_from_where_the_version_says_it() {
        let domain: Domain = "p.example".parse().expect("domain");
        let of = port(1);
        let name = domain.name(of);
        let head = |uri: &str, hosts: &[&str]| {
            let mut request = Request::get(uri);
            for host in hosts {
                request = request.header("host", *host);
            }
            host(&domain, &request.body(()).expect("request").into_parts().0)
        };
        assert_eq!(head("/", &[&name]), Named::Port(of));
        assert_eq!(head(&format!("https://{name}/"), &[]), Named::Port(of));
        assert_eq!(head("/", &["x.p.example"]), Named::Nothing);
        assert_eq!(head("/", &[]), Named::Elsewhere);
        assert_eq!(head("/", &["127.0.0.1:7070"]), Named::Elsewhere);
    }

    #[test]
    fn a_stranger_may_connect_to_that_port_and_nothing_else() {
        let of = port(80);
        let caller = stranger(of, AppId::generate());
        let own = of.session.to_string();
        for row in pepo_api::ROUTES {
            let connects = row.action == Action::PortsConnect;
            let port = allow(caller.principal(), row.action, Resource::Port(&own, "80"));
            assert_eq!(port.is_ok(), connects, "{}", row.name);
            assert!(allow(caller.principal(), row.action, Resource::Port(&own, "81")).is_err());
            // Every row that connects is about a port; no other one lets a stranger to the Session.
            assert!(
                connects || allow(caller.principal(), row.action, Resource::Session(&own)).is_err(),
                "{}",
                row.name
            );
            assert!(!connects || row.subject == pepo_api::Subject::Port, "{}", row.name);
            assert!(allow(caller.principal(), row.action, Resource::App).is_err());
        }
        assert_eq!(route::port_get.action, Action::PortsConnect);
    }

    #[test]
    fn strangers_have_shares_that_floods_do_not_take_from_others() {
        let strangers = Strangers::default();
        let (of, rate) = (port(80), Rate::of(4));
        let address = |n: u8| IpAddr::from([192, 0, 2, n]);
        let flood = |of, n| (0..100).filter(|_| strangers.take(of, address(n), rate).is_ok()).count();
        assert_eq!(flood(of, 1), 4, "an address has half of a port's");
        assert!(strangers.take(of, address(2), rate).is_ok(), "and another one has its own");
        let all: usize = (2..50).map(|n| flood(of, n)).sum();
        assert_eq!(all, 3, "a port has 8 at once");
        assert_eq!(strangers.take(of, address(60), rate).expect_err("over").whose, "strangers at one published port");
        let others: usize = (100..200).map(|n| flood(port(1000), n)).sum();
        assert_eq!(others, 8, "all have twice that together");
        assert_eq!(strangers.take(port(1), address(61), rate).expect_err("over").limit, 8);

        let places = Strangers::default();
        let mut turns = Vec::new();
        for n in 0..8 {
            turns.push(places.enter(of, address(n), 32).expect("a place"));
        }
        assert_eq!(places.enter(of, address(9), 32).err().map(|over| over.limit), Some(8), "a port has a quarter");
        let mut own: Vec<_> = (0..3).map(|_| places.enter(port(2), address(9), 32)).collect();
        assert!(own.iter().all(Result::is_ok));
        own.push(places.enter(port(3), address(9), 32));
        assert!(own[3].is_ok() && places.enter(port(4), address(9), 32).is_err(), "an address has an eighth");
        turns.clear();
        assert!(places.enter(of, address(9), 32).is_err() && places.enter(of, address(1), 32).is_ok());
    }
}

//! Requests to a port by its own host name: which port that is, who asks, and out of whose share.

use std::net::IpAddr;

use http::header;
use http::request::Parts;
use pepo_api::{AppId, Error, ErrorCode, Named, PortName, Route, allow};

use super::{Edge, NO_KEY, Seen, presented, refuse};
use crate::auth::{Caller, Who};
use crate::named::{self, Turn};
use crate::own::{Refusal, used_up};

impl Edge {
    /// The port whose name the request's host is. What is below the domain and no port's answers nobody.
    pub(super) fn port(&self, parts: &Parts, from: IpAddr) -> Result<Option<PortName>, Refusal> {
        match self.rules.domain.as_ref().map_or(Named::Elsewhere, |domain| named::host(domain, parts)) {
            Named::Elsewhere => Ok(None),
            Named::Port(of) => Ok(Some(of)),
            Named::Nothing if parts.headers.contains_key(header::AUTHORIZATION) => {
                let error = Error::new(ErrorCode::NotFound, "no port has this host name");
                Err(error.hint("a port's is `{port}-{32 hex digits of the Session's id}.{domain}`").into())
            }
            // As one that could be a port's.
            Named::Nothing => {
                self.gate.failed(from);
                Err(refuse(NO_KEY))
            }
        }
    }

    /// Who asks for a published port: a caller whose credential opens it, by their own share, else anybody, by a stranger's.
    pub(super) async fn visitor(
        &self,
        parts: &Parts,
        row: &Route,
        from: IpAddr,
        seen: &mut Seen,
        (of, app): (PortName, AppId),
    ) -> Result<Caller, Refusal> {
        if presented(parts, row).is_some() {
            match self.caller(parts, row, from, seen).await {
                Ok(caller) if caller.app == app => return Ok(caller),
                // It opens nothing here, and nothing is needed.
                Ok(_) => {}
                Err(refusal) if [ErrorCode::Unauthenticated, ErrorCode::Forbidden].contains(&refusal.error.code) => {}
                Err(refusal) => return Err(refusal),
            }
        }
        (seen.caller, seen.level, seen.public) = (None, None, true);
        let taken = self.strangers.take(of, from, self.rules.limits.public).map_err(crowded)?;
        seen.level = Some(taken);
        let stranger = named::stranger(of, app);
        match allow(stranger.principal(), row.action, row.resource(parts.uri.path())) {
            Ok(_) => Ok(stranger),
            Err(_) => Err(refuse(NO_KEY)),
        }
    }

    /// A place among the requests that run at once.
    pub(super) fn turn(&self, caller: &Caller, from: IpAddr) -> Result<Turn, Refusal> {
        let most = self.rules.streams;
        if let Who::Stranger(of) = caller.who {
            return self.strangers.enter(of, from, most).map_err(crowded);
        }
        let open = self.open.enter(caller.who.clone(), most).ok_or_else(|| {
            let message = format!("this caller has {most} requests open, as many as may be");
            used_up("streams", most as u64, message, 1)
        })?;
        Ok(Box::new(open))
    }
}

/// A share of strangers that is used up.
fn crowded(over: named::Over) -> Refusal {
    let (wait, name) = over.level.map_or((1, "streams"), |level| (level.reset_seconds, "requests_per_second"));
    used_up(name, over.limit, format!("{} have what they may have at once", over.whose), wait)
}

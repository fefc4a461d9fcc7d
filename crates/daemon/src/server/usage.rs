//! The route of use: what was used between two times, and by what.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use pepo_api::query::ShowUsage;
use pepo_api::{Amounts, ErrorCode, UsageReport, route};

use super::{Call, Caller, Problem, Query, Routes};
use crate::Pepod;
use crate::session::Error;
use crate::store::{self, GroupBy};

/// How far back a report without a beginning reaches.
const DAYS: i64 = 30;

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::usage, usage);
}

async fn usage(State(pepod): State<Pepod>, call: Call, Query(query): Query<ShowUsage>) -> Result<Response, Problem> {
    let ShowUsage { app, from, to, group_by } = query;
    let app_id = match (&app, call.caller) {
        (None, Caller::Operator { .. }) => None,
        (None, _) => Some(call.app),
        (Some(which), caller) => {
            let found = pepod.app(which);
            // Another's App is as one that is not there.
            let visible = found.filter(|id| matches!(caller, Caller::Operator { .. }) || *id == call.app);
            let shown = || which.chars().take(80).flat_map(char::escape_debug).collect::<String>();
            Some(visible.ok_or_else(|| Problem::new(ErrorCode::NotFound, format!("no App `{}`", shown())))?)
        }
    };
    let to = to.unwrap_or_else(jiff::Timestamp::now);
    let month = jiff::SignedDuration::from_hours(24 * DAYS);
    let from = from.unwrap_or_else(|| to.checked_sub(month).unwrap_or(jiff::Timestamp::MIN));
    if from > to {
        return Err(Problem::invalid("from", "from must not be after to"));
    }
    let groups = pepod
        .store()
        .usage(app_id, store::millis(from), store::millis(to), grouping(group_by.as_deref())?)
        .await
        .map_err(Error::from)?;
    let mut total = Amounts::default();
    groups.iter().for_each(|group| total += group.amounts);
    Ok(axum::Json(UsageReport { app_id, from, to, group_by, total, groups }).into_response())
}

fn grouping(text: Option<&str>) -> Result<GroupBy, Problem> {
    Ok(match text {
        None => GroupBy::All,
        Some("app") => GroupBy::App,
        Some("session") => GroupBy::Session,
        Some("day") => GroupBy::Day,
        Some(text) => match text.strip_prefix("label:") {
            Some(key) if !key.is_empty() && key.len() <= 63 => GroupBy::Label(key.to_owned()),
            _ => return Err(Problem::invalid("group_by", "group_by is `app`, `session`, `day` or `label:KEY`")),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_named() {
        assert_eq!(grouping(Some("label:user")).ok(), Some(GroupBy::Label("user".into())));
        for wrong in ["", "label:", "user", "label"] {
            assert!(grouping(Some(wrong)).is_err(), "{wrong}");
        }
    }
}

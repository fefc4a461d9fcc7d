//! Rows of Commands: what was asked for, and how it ended.

use pepo_api::{CommandEnd, CommandId, CommandLimits, CommandRole, OnDisconnect, SessionId};
use rusqlite::{OptionalExtension, Row, Transaction, params};
use serde::{Deserialize, Serialize};

use super::{Error, Store, id, json, millis, time, to_json};

/// What of a command is shown and needed again after a restart. Its environment and input are not kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandSpec {
    /// Program and arguments, or the one line.
    pub argv: Vec<String>,
    /// The lasting shell it runs in.
    pub shell: Option<String>,
    /// What becomes of it when its caller goes away.
    pub on_disconnect: OnDisconnect,
    /// Whether it has a terminal.
    pub pty: bool,
    /// Whether it takes input.
    pub stdin: bool,
    /// Whether it counts as activity.
    pub keeps_alive: bool,
    /// What it is for.
    #[serde(default)]
    pub role: CommandRole,
    /// The Service it is a run of.
    #[serde(default)]
    pub service: Option<String>,
    /// What its processes may have together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<CommandLimits>,
}

/// A Command as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct CommandRow {
    /// Its Session.
    pub session: SessionId,
    /// Its id.
    pub id: CommandId,
    /// What was asked for.
    pub spec: CommandSpec,
    /// The activation it runs in.
    pub activation: u64,
    /// When it was started.
    pub started_at: jiff::Timestamp,
    /// How it ended.
    pub end: Option<CommandEnd>,
    /// Bytes of standard output.
    pub stdout_bytes: u64,
    /// Bytes of standard error.
    pub stderr_bytes: u64,
}

/// The end of a Command.
#[derive(Clone, Debug, PartialEq)]
pub struct EndRow {
    /// Its Session.
    pub session: SessionId,
    /// Its id.
    pub id: CommandId,
    /// How it ended.
    pub end: CommandEnd,
    /// Bytes of standard output.
    pub stdout_bytes: u64,
    /// Bytes of standard error.
    pub stderr_bytes: u64,
}

pub(super) fn insert(transaction: &Transaction<'_>, row: &CommandRow) -> Result<(), Error> {
    transaction
        .prepare_cached(
            "INSERT OR IGNORE INTO commands (session_id, id, spec, activation, started_at) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?
        .execute(params![
            row.session.to_string(),
            row.id.to_string(),
            to_json(&row.spec)?,
            row.activation as i64,
            millis(row.started_at)
        ])?;
    Ok(())
}

pub(super) fn end(transaction: &Transaction<'_>, row: &EndRow) -> Result<(), Error> {
    transaction
        .prepare_cached(
            "UPDATE commands SET ended_at = ?3, ended = ?4, stdout_bytes = ?5, stderr_bytes = ?6
             WHERE session_id = ?1 AND id = ?2 AND ended_at IS NULL",
        )?
        .execute(params![
            row.session.to_string(),
            row.id.to_string(),
            millis(row.end.at),
            to_json(&row.end)?,
            row.stdout_bytes as i64,
            row.stderr_bytes as i64
        ])?;
    Ok(())
}

/// Forgets commands of Sessions that are about to be forgotten, and those that ended so long ago themselves.
pub(super) fn prune(transaction: &Transaction<'_>, before: i64) -> Result<(), Error> {
    transaction.execute("DELETE FROM commands WHERE ended_at < ?1", [before])?;
    transaction
        .execute("DELETE FROM commands WHERE session_id IN (SELECT id FROM sessions WHERE ended_at < ?1)", [before])?;
    Ok(())
}

fn read(row: &Row<'_>) -> Result<CommandRow, rusqlite::Error> {
    let ended: Option<String> = row.get("ended")?;
    Ok(CommandRow {
        session: id(row, "session_id")?,
        id: id(row, "id")?,
        spec: json(row, "spec")?,
        activation: row.get::<_, i64>("activation")? as u64,
        started_at: time(row.get("started_at")?),
        end: ended.map(|_| json(row, "ended")).transpose()?,
        stdout_bytes: row.get::<_, i64>("stdout_bytes")? as u64,
        stderr_bytes: row.get::<_, i64>("stderr_bytes")? as u64,
    })
}

impl Store {
    /// Commands of that Session that have no end yet, oldest first.
    ///
    /// # Errors
    /// A disk that fails.
    pub fn running_commands(&self, session: SessionId) -> Result<Vec<CommandRow>, Error> {
        self.read_now(|connection| {
            connection
                .prepare_cached(
                    "SELECT * FROM commands WHERE session_id = ?1 AND ended_at IS NULL ORDER BY started_at",
                )?
                .query_map([session.to_string()], read)?
                .collect()
        })
    }

    /// The last run of each Service in that activation, by the Service's name.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn last_runs(&self, session: SessionId, activation: u64) -> Result<Vec<CommandRow>, Error> {
        self.read(move |connection| {
            // Ids are in the order of their making.
            connection
                .prepare_cached(
                    "SELECT * FROM commands WHERE id IN (
                         SELECT max(id) FROM commands
                         WHERE session_id = ?1 AND activation = ?2 AND spec ->> 'service' IS NOT NULL
                         GROUP BY spec ->> 'service') AND session_id = ?1",
                )?
                .query_map(params![session.to_string(), activation as i64], read)?
                .collect()
        })
        .await
    }

    /// A command of that Session. The caller has found the Session by its App.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn command(&self, session: SessionId, command: CommandId) -> Result<Option<CommandRow>, Error> {
        self.read(move |connection| {
            connection
                .prepare_cached("SELECT * FROM commands WHERE session_id = ?1 AND id = ?2")?
                .query_row([session.to_string(), command.to_string()], read)
                .optional()
        })
        .await
    }

    /// Commands of that Session, newest first.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn list_commands(
        &self,
        session: SessionId,
        before: Option<CommandId>,
        limit: usize,
    ) -> Result<Vec<CommandRow>, Error> {
        self.read(move |connection| {
            let before = before.map_or_else(|| "~".to_owned(), |id| id.to_string());
            connection
                .prepare_cached("SELECT * FROM commands WHERE session_id = ?1 AND id < ?2 ORDER BY id DESC LIMIT ?3")?
                .query_map(params![session.to_string(), before, limit as i64], read)?
                .collect()
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use pepo_api::Reason;

    use super::super::Write;
    use super::*;

    #[tokio::test]
    async fn the_first_end_stands() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let (session, command) = (SessionId::generate(), CommandId::generate());
        let spec = CommandSpec {
            argv: vec!["true".into()],
            shell: None,
            on_disconnect: OnDisconnect::Keep,
            pty: false,
            stdin: false,
            keeps_alive: true,
            role: CommandRole::Command,
            service: None,
            limits: None,
        };
        let row = CommandRow {
            session,
            id: command,
            spec,
            activation: 1,
            started_at: time(5),
            end: None,
            stdout_bytes: 0,
            stderr_bytes: 0,
        };
        store.write(Write::NewCommand(Box::new(row.clone()))).await.expect("new");
        assert_eq!(store.running_commands(session).expect("running"), vec![row]);
        for (reason, bytes) in [(Reason::Exit, 7), (Reason::Unknown, 0)] {
            let end = CommandEnd { reason, exit_code: None, signal: None, signal_number: None, cwd: None, at: time(9) };
            let row = EndRow { session, id: command, end, stdout_bytes: bytes, stderr_bytes: 0 };
            store.write(Write::EndCommand(Box::new(row))).await.expect("end");
        }
        let found = store.command(session, command).await.expect("read").expect("there");
        assert_eq!(found.end.map(|end| end.reason), Some(Reason::Exit));
        assert_eq!(found.stdout_bytes, 7);
        assert!(store.running_commands(session).expect("running").is_empty());
    }

    #[tokio::test]
    async fn the_last_run_of_each_service_is_found() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let session = SessionId::generate();
        let mut ids = Vec::new();
        for (activation, service) in [(1, "web"), (2, "web"), (2, "db"), (2, "web")] {
            let id = CommandId::generate();
            let spec = CommandSpec {
                argv: vec!["x".into()],
                shell: None,
                on_disconnect: OnDisconnect::Keep,
                pty: false,
                stdin: false,
                keeps_alive: false,
                role: CommandRole::Service,
                service: Some(service.into()),
                limits: None,
            };
            let row = CommandRow {
                session,
                id,
                spec,
                activation,
                started_at: time(5),
                end: None,
                stdout_bytes: 0,
                stderr_bytes: 0,
            };
            store.write(Write::NewCommand(Box::new(row))).await.expect("new");
            ids.push(id);
        }
        let mut found: Vec<_> =
            store.last_runs(session, 2).await.expect("read").into_iter().map(|row| row.id).collect();
        found.sort();
        assert_eq!(found, [ids[2], ids[3]]);
        assert!(store.last_runs(SessionId::generate(), 2).await.expect("read").is_empty());
    }
}

//! pepo-edge: reads its settings, binds, drops every right it has, serves until it is told to end.

#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use pepo_edge::auth::Gate;
use pepo_edge::config::{Config, Lifeline, Start};
use pepo_edge::decisions::Decisions;
use pepo_edge::fetch::Fetch;
use pepo_edge::handler::Rules;
use pepo_edge::jwt::Issuers;
use pepo_edge::keys::Keys;
use pepo_edge::lines::Lines;
use pepo_edge::threads::Threads;
use pepo_edge::tls::Tls;
use pepo_edge::upstream::Upstream;
use pepo_edge::{handler, port, rights, server};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};

/// What we are to whoever wants a processor: before the Sandboxes, after pepod.
const NICE: i32 = -5;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "pepo-edge: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let config = match pepo_edge::config::from_process()? {
        Start::Serve(config) => config,
        Start::Check(config) => {
            rights::drop_all(rights::USER)?;
            if let Some(files) = config.tls.clone() {
                Tls::open(files)?;
            }
            for issuer in &config.issuers {
                let fetch = Fetch::new(issuer.authorities.as_deref());
                fetch.map_err(|error| anyhow::anyhow!("issuers.{}.authorities: {error}", issuer.name))?;
            }
            writeln!(std::io::stdout(), "the edge's settings are sound")?;
            return Ok(());
        }
        Start::Say(text) => {
            writeln!(std::io::stdout(), "{text}")?;
            return Ok(());
        }
    };
    // While the rights are still there: bind, say where, look up who holds a port that is taken.
    let listener = if config.listen.port() == 0 {
        let last = config.url_file.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
        port::bind_free(config.listen, last.as_deref())?
    } else {
        port::bind(config.listen)?
    };
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{}", listener.local_addr()?);
    if let Some(path) = &config.url_file {
        std::fs::write(path, format!("{url}\n")).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if matches!(config.lifeline, Lifeline::StandardInput) {
        // Started by `pepo up`: nobody else keeps processor time for us. A unit of systemd's has its weight.
        let _ = rustix::process::setpriority_process(None, NICE);
    }
    rights::drop_all(rights::USER)?;

    let filter = tracing_subscriber::EnvFilter::try_new(&config.log)
        .with_context(|| format!("log.level = `{}` is not a filter", config.log))?;
    let log = Lines::to(std::io::stderr());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(log.clone()).with_ansi(false).init();
    // Read without any right: it must be readable so later too, when it changes.
    let tls = config.tls.clone().map(Tls::open).transpose()?;
    writeln!(std::io::stdout(), "{url}")?;

    // This thread accepts connections, and knows who may call and what was refused. Half of the processors serve what it
    // accepted: pepod has as much to do for a request as we have.
    let threads = Threads::start(std::thread::available_parallelism().map_or(1, |all| all.get() / 2).min(4))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served = runtime.block_on(serve(listener, *config, tls, threads, log.clone()));
    log.flush();
    served
}

async fn serve(
    listener: std::net::TcpListener,
    config: Config,
    tls: Option<Tls>,
    threads: Threads,
    log: Lines,
) -> anyhow::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let upstream = Upstream::new(config.socket.clone());
    let keys = Arc::new(Keys::default());
    let issuers = Arc::new(Issuers::new(config.issuers));
    let (decisions, noted) = Decisions::new();
    let tls = tls.map(Arc::new);
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(log.follow());
    tasks.spawn(pepo_edge::keys::follow(keys.clone(), upstream.clone()));
    tasks.spawn(pepo_edge::jwt::follow(issuers.clone()));
    tasks.spawn(pepo_edge::decisions::follow(noted, upstream.clone()));
    if let Some(tls) = tls.clone() {
        tasks.spawn(async move { tls.follow().await });
    }
    let bounds = server::Bounds::for_this_process().within(&config.limits);
    let gate = Gate::new(keys, issuers, config.limits.failures);
    let rules = Rules {
        proxies: config.proxies,
        origins: config.origins,
        domain: config.domain,
        streams: config.limits.streams.unwrap_or(bounds.connections * 3 / 4).max(1),
        limits: config.limits,
        ..Rules::default()
    };
    let edge = Arc::new(handler::Edge::new(gate, rules, upstream, decisions));
    let result = server::serve(listener, edge, tls, bounds, threads, end(config.lifeline)).await;
    drop(tasks);
    result.context("the listener failed")
}

/// Until somebody asks for the end: by signal, or, with a lifeline, by closing our standard input (a parent that dies does).
async fn end(lifeline: Lifeline) {
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
        tracing::error!("signals cannot be watched");
        return;
    };
    let parent_gone = async {
        match lifeline {
            Lifeline::None => std::future::pending().await,
            Lifeline::StandardInput => input_closes().await,
        }
    };
    tokio::select! {
        _ = term.recv() => tracing::info!("asked to end"),
        _ = int.recv() => tracing::info!("interrupted"),
        result = parent_gone => match result {
            Ok(()) => tracing::info!("the process that started this one is gone"),
            Err(error) => tracing::error!(%error, "--lifeline wants a pipe as standard input"),
        },
    }
}

async fn input_closes() -> std::io::Result<()> {
    let input = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned()?;
    let mut pipe = tokio::net::unix::pipe::Receiver::from_owned_fd(input)?;
    let mut bytes = [0u8; 64];
    while matches!(pipe.read(&mut bytes).await, Ok(n) if n > 0) {}
    Ok(())
}

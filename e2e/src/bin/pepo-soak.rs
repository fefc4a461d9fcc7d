//! `make soak`: what takes too long for `make test`. Many boots in a row, of which not one may hang; then a browser.

#![allow(clippy::panic, clippy::expect_used, reason = "a soak fails by panicking")]
#![allow(clippy::print_stdout, reason = "its report is its purpose")]

use std::time::Duration;

use pepo_e2e::{Instance, Options};

/// What is counted as a hang: a boot takes about two seconds.
const HANG: Duration = Duration::from_secs(120);

fn main() {
    let boots = std::env::var("BOOTS")
        .ok()
        .filter(|text| !text.is_empty())
        .map_or(200, |text| text.parse().expect("BOOTS is a number"));
    boot(boots);
    browse();
}

fn boot(count: usize) {
    let instance = Instance::new();
    let mut times: Vec<Duration> = Vec::with_capacity(count);
    for n in 1..=count {
        let ran = instance.pepo_run(["true"]).within(HANG).ok();
        times.push(ran.took);
        if n.is_multiple_of(20) || n == count {
            println!("      {n} of {count} boots, the last one in {:.2} s", ran.took.as_secs_f64());
        }
    }
    instance.end();
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64();
    println!(
        "      {count} boots, none hung: p50 {:.2} s, p90 {:.2} s, p99 {:.2} s, most {:.2} s",
        at(50),
        at(90),
        at(99),
        at(100)
    );
}

/// Debian's chromium, with its own sandbox on, loads a page and prints it.
fn browse() {
    let instance = Instance::with(Options::default());
    println!("      building the Image `browser`");
    let built = instance.pepo(["image", "build", "browser"]).within(Duration::from_secs(3600)).ok();
    println!("      built in {:.0} s", built.took.as_secs_f64());
    let folder = tempfile::tempdir().expect("directory");
    std::fs::write(
        folder.path().join("page.html"),
        "<title>Pepo</title><h1>A page</h1><script>document.write(6 * 7)</script>",
    )
    .expect("write");
    let script = "chromium --headless --disable-gpu --no-first-run --print-to-pdf=/home/agent/page.pdf file:///home/agent/page.html && head -c 5 page.pdf";
    let ran = instance
        .pepo([
            "run", "--image", "browser", "--memory", "2G", "--copy", ".", "--out", "page.pdf", "--", "bash", "-c",
            script,
        ])
        .directory(folder.path())
        .within(Duration::from_secs(1800))
        .ok();
    assert_eq!(ran.out(), "%PDF-", "{ran}");
    let pdf = std::fs::metadata(folder.path().join("page.pdf")).expect("the PDF came out");
    println!(
        "      chromium wrote a PDF of {} bytes in {:.0} s, its own sandbox on",
        pdf.len(),
        ran.took.as_secs_f64()
    );
    instance.end();
}

//! HTTP to what listens in a real guest, through the edge, with a token of that port alone.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use pepo_e2e::{Instance, Options};

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{answer:?}"))
}

/// GET at this URL with this token.
fn get(url: &str, token: &str) -> String {
    let (address, path) = url.strip_prefix("http://").and_then(|rest| rest.split_once('/')).expect("a URL");
    ask(address, "x", path, &format!("authorization: Bearer {token}\r\n"))
}

/// GET of this path from whoever listens at that address, of that host.
fn ask(address: &str, host: &str, path: &str, more: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("time-out");
    let head = format!("GET /{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{more}\r\n");
    stream.write_all(head.as_bytes()).expect("write");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("read");
    answer
}

#[tokio::test]
async fn a_token_of_one_port_reaches_what_listens_there_over_http() {
    let instance = Instance::new();
    let up = instance.up();
    let client = instance.client();
    let service = serde_json::json!({
        "workspace": null,
        "services": [{"name": "web", "command": "cd ~ && echo inside > page && exec python3 -m http.server 8000", "port": 8000}]
    });
    let session = client.session_create(&serde_json::from_value(service).expect("body")).await.expect("session").id;
    let ran = instance.pepo(["url", &session.to_string(), "8000", "--expires", "10m", "--json"]).ok();
    let told: serde_json::Value = serde_json::from_str(&ran.out()).expect("JSON");
    let (url, token) = (told["url"].as_str().expect("url"), told["token"].as_str().expect("token"));
    // The Sandbox and its Service come up for it.
    let page = get(&format!("{url}page"), token);
    assert!(status(&page) == 200 && page.ends_with("\r\n\r\ninside\n"), "{page}");
    let head = page.to_lowercase();
    assert!(head.contains("content-security-policy: sandbox") && head.contains("server: simplehttp"), "{page}");
    assert_eq!(status(&get(&format!("{url}missing"), token)), 404, "the program's own answer");
    assert_eq!(status(&get(&url.replace("/8000/", "/8001/"), token)), 403);
    assert_eq!(status(&get(&format!("{url}page"), "pepo_0000")), 401);
    let plain = instance.pepo(["url", &session.to_string(), "8000"]).ok();
    assert_eq!(plain.out().trim(), url);
    // Where the operator gave no domain, nothing is published.
    let public = instance.pepo(["url", &session.to_string(), "8000", "--public"]).run();
    assert_ne!(public.code(), Some(0), "{public}");
    assert!(public.to_string().contains("edge.domain"), "{public}");
    client.session_terminate(&session.to_string()).await.expect("end");
    assert_eq!(status(&get(&format!("{url}page"), token)), 410);
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
}

#[tokio::test]
async fn a_published_port_is_reached_by_its_own_name_until_it_is_withdrawn() {
    let config = Some("[edge]\ndomain = \"preview.example.com\"\n".to_owned());
    let instance = Instance::with(Options { config, ..Options::default() });
    let up = instance.up();
    let client = instance.client();
    let service = serde_json::json!({
        "workspace": null,
        "services": [{"name": "web", "command": "cd ~ && mkdir v1 && echo inside > v1/sessions && exec python3 -m http.server 8000", "port": 8000}]
    });
    let session = client.session_create(&serde_json::from_value(service).expect("body")).await.expect("session").id;
    let url = |flags: &[&str]| {
        let ran = instance.pepo([&["url", &session.to_string(), "8000", "--json"], flags].concat()).ok();
        serde_json::from_str::<serde_json::Value>(&ran.out()).expect("JSON")
    };
    let own = format!("8000-{}.preview.example.com", session.hex());
    let published = url(&["--public", "--expires", "10m"]);
    let address = published["url"].as_str().and_then(|url| url.strip_prefix("http://")).expect("a URL");
    let (host, rest) = address.split_once('/').expect("a path");
    let (name, port) = host.split_once(':').expect("a port");
    assert_eq!((name, rest, &published["public"]), (own.as_str(), "", &serde_json::Value::Bool(true)));
    let edge = format!("127.0.0.1:{port}");
    // The Sandbox and its Service come up for a stranger; the whole path is the program's.
    let page = ask(&edge, host, "v1/sessions", "");
    assert!(status(&page) == 200 && page.ends_with("\r\n\r\ninside\n"), "{page}");
    let head = page.to_lowercase();
    assert!(!head.contains("content-security-policy") && head.contains("server: simplehttp"), "{page}");
    assert_eq!(status(&ask(&edge, &own.to_uppercase(), "missing", "")), 404, "the program's own answer");
    let others = [
        own.replacen("8000", "8001", 1),
        format!("8000-{}.preview.example.com", "0".repeat(32)),
        format!("{own}."),
        "www.preview.example.com".to_owned(),
    ];
    for host in &others {
        for path in ["", "healthz", "v1/sessions"] {
            assert_eq!(status(&ask(&edge, host, path, "")), 401, "{host}/{path}");
        }
    }
    assert_eq!(status(&ask(&edge, &format!("{own}.evil"), "healthz", "")), 200, "the API's own");
    assert_eq!(status(&ask(&edge, "x", &format!("v1/sessions/{session}/ports/8000/"), "")), 401);

    let withdrawn = url(&["--withdraw"]);
    assert_eq!(withdrawn["public"], false);
    assert_eq!(status(&ask(&edge, host, "", "")), 401);
    let token = url(&["--expires", "10m"])["token"].as_str().expect("a token").to_owned();
    let with = |host: &str| status(&ask(&edge, host, "", &format!("authorization: Bearer {token}\r\n")));
    assert_eq!((with(host), with(&others[0])), (200, 403));

    url(&["--public"]);
    assert_eq!(status(&ask(&edge, host, "", "")), 200);
    client.session_terminate(&session.to_string()).await.expect("end");
    assert_eq!(status(&ask(&edge, host, "", "")), 401, "as one that never was");
    assert_eq!(with(host), 410);
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
}

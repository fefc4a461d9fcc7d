//! HTTP to what listens in a real guest, through the edge, with a token of that port alone.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use pepo_e2e::Instance;

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{answer:?}"))
}

/// GET at this URL with this token.
fn get(url: &str, token: &str) -> String {
    let (address, path) = url.strip_prefix("http://").and_then(|rest| rest.split_once('/')).expect("a URL");
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("time-out");
    let head = format!("GET /{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\nconnection: close\r\n\r\n");
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
    let public = instance.pepo(["url", &session.to_string(), "8000", "--public"]).run();
    assert_eq!(public.code(), Some(1), "{public}");
    client.session_terminate(&session.to_string()).await.expect("end");
    assert_eq!(status(&get(&format!("{url}page"), token)), 410);
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
}

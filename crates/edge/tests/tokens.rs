//! Tokens of identity providers: the right ones give what the settings say, and every way to bend one gives nothing.

#![allow(clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod world;

use std::path::Path;
use std::time::{Duration, Instant};

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair, RSA_PKCS1_SHA256};
use aws_lc_rs::{hmac, rsa};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use jsonwebtoken::Algorithm;
use pepo_edge::config::Issuer;
use pepo_edge::fetch::Place;
use pepo_edge::rate::Rate;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use world::{Options, start, status};

const ISSUER: &str = "https://id.example.com";

/// An identity provider's keys.
struct Provider {
    curve: EcdsaKeyPair,
    rsa: rsa::KeyPair,
}

fn encoded(bytes: impl AsRef<[u8]>) -> String {
    BASE64.encode(bytes)
}

impl Provider {
    fn new() -> Self {
        Provider {
            curve: EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).expect("key"),
            rsa: rsa::KeyPair::generate(rsa::KeySize::Rsa2048).expect("key"),
        }
    }

    fn modulus(&self) -> Vec<u8> {
        self.rsa.public_key().modulus().big_endian_without_leading_zero().to_vec()
    }

    fn set(&self, curve_name: &str) -> Value {
        let point = self.curve.public_key().as_ref();
        let exponent = self.rsa.public_key().exponent().big_endian_without_leading_zero().to_vec();
        json!({"keys": [
            {"kty": "EC", "crv": "P-256", "kid": curve_name, "use": "sig", "x": encoded(&point[1..33]), "y": encoded(&point[33..])},
            {"kty": "RSA", "kid": "rsa", "alg": "RS256", "n": encoded(self.modulus()), "e": encoded(exponent)},
            {"kty": "oct", "kid": "oct", "k": encoded(b"a secret that everybody can read here")},
            {"kty": "nobody knows this one", "kid": "odd"},
        ]})
    }

    fn sign(&self, header: &Value, claims: &Value, how: &str) -> String {
        let message = format!("{}.{}", encoded(header.to_string()), encoded(claims.to_string()));
        let signature = match how {
            "ES256" => self.curve.sign(&SystemRandom::new(), message.as_bytes()).expect("signature").as_ref().to_vec(),
            "RS256" => {
                let mut signature = vec![0; self.rsa.public_modulus_len()];
                let random = SystemRandom::new();
                self.rsa.sign(&RSA_PKCS1_SHA256, &random, message.as_bytes(), &mut signature).expect("signature");
                signature
            }
            "none" => vec![],
            // The swap: the public key's bytes as the secret of a shared-secret algorithm.
            "HS by modulus" => mac(&self.modulus(), &message),
            "HS by oct" => mac(b"a secret that everybody can read here", &message),
            other => panic!("{other}"),
        };
        format!("{message}.{}", encoded(signature))
    }
}

fn mac(secret: &[u8], message: &str) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), message.as_bytes()).as_ref().to_vec()
}

fn issuer(keys: &Path) -> Issuer {
    Issuer {
        name: "corp".into(),
        issuer: ISSUER.into(),
        audiences: vec!["pepo".into()],
        keys: Some(Place::File(keys.into())),
        authorities: None,
        algorithms: vec![Algorithm::ES256, Algorithm::RS256],
        leeway: Duration::from_secs(5),
        app: vec!["default".into()],
        app_claim: None,
        scopes: vec!["sessions:*".parse().expect("scope"), "commands:*".parse().expect("scope")],
        scope_claim: None,
        scope_prefix: String::new(),
        subject_claim: "sub".into(),
    }
}

fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

fn claims() -> Value {
    json!({"iss": ISSUER, "aud": "pepo", "sub": "me@example.com", "exp": now() + 300, "iat": now()})
}

fn changed(mut claims: Value, name: &str, value: Value) -> Value {
    if value.is_null() {
        claims.as_object_mut().expect("object").remove(name);
    } else {
        claims[name] = value;
    }
    claims
}

/// An edge that trusts this provider, once it has its keys.
async fn trusting(provider: &Provider, change: impl FnOnce(&mut Issuer)) -> (world::Fixture, tempfile::TempDir) {
    let directory = tempfile::tempdir().expect("directory");
    let keys = directory.path().join("keys.json");
    std::fs::write(&keys, provider.set("curve").to_string()).expect("write");
    let mut issuer = issuer(&keys);
    change(&mut issuer);
    let options = Options { issuers: vec![issuer], ..Options::default() };
    (start(options).await, directory)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_gives_the_app_and_the_scopes_that_the_settings_say() {
    let provider = Provider::new();
    let (f, _directory) = trusting(&provider, |_| {}).await;
    for (kid, how) in [("curve", "ES256"), ("rsa", "RS256")] {
        let token = provider.sign(&json!({"alg": how, "kid": kid, "typ": "JWT"}), &claims(), how);
        let answer = f.get("/v1/sessions", &token, "").await;
        assert_eq!(status(&answer), 200, "{answer}");
        assert_eq!(status(&f.get("/v1/workspaces", &token, "").await), 403, "the settings do not give that");
        assert_eq!(status(&f.get("/v1/keys", &token, "").await), 403);
    }
    let list = changed(claims(), "aud", json!(["other", "pepo"]));
    let token = provider.sign(&json!({"alg": "ES256", "kid": "curve"}), &list, "ES256");
    assert_eq!(status(&f.get("/v1/sessions", &token, "").await), 200);
    let asked = f.daemon.asked();
    assert_eq!(asked[0].headers["pepo-app"], f.app.to_string().as_str());
    assert_eq!(asked[0].headers["pepo-actor"], "idp:corp:me@example.com");
    assert!(asked[0].headers.get("pepo-key").is_none() && asked[0].headers.get("authorization").is_none());
    let told = f.told(|decision| decision.actor.as_deref() == Some("idp:corp:me@example.com")).await;
    assert!(!format!("{told:?}").contains("eyJ"), "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bent_token_gives_nothing() {
    let provider = Provider::new();
    let other = Provider::new();
    let (f, _directory) = trusting(&provider, |_| {}).await;
    let es = json!({"alg": "ES256", "kid": "curve"});
    let rs = json!({"alg": "RS256", "kid": "rsa"});
    let good = provider.sign(&es, &claims(), "ES256");
    assert_eq!(status(&f.get("/v1/sessions", &good, "").await), 200);
    let with = |name: &str, value: Value| provider.sign(&es, &changed(claims(), name, value), "ES256");
    let cut = |n: usize| good.split('.').take(n).collect::<Vec<_>>().join(".");
    let swapped = {
        let mut parts: Vec<String> = good.split('.').map(str::to_owned).collect();
        parts[1] = encoded(changed(claims(), "sub", json!("root")).to_string());
        parts.join(".")
    };
    let bent = [
        ("alg none", provider.sign(&json!({"alg": "none", "kid": "curve"}), &claims(), "none")),
        ("alg None", provider.sign(&json!({"alg": "None", "kid": "curve"}), &claims(), "none")),
        ("no alg", provider.sign(&json!({"kid": "curve"}), &claims(), "none")),
        ("HS for RS", provider.sign(&json!({"alg": "HS256", "kid": "rsa"}), &claims(), "HS by modulus")),
        ("HS by a published secret", provider.sign(&json!({"alg": "HS256", "kid": "oct"}), &claims(), "HS by oct")),
        ("no signature", provider.sign(&es, &claims(), "none")),
        ("another kind's key", provider.sign(&json!({"alg": "ES256", "kid": "rsa"}), &claims(), "ES256")),
        ("another kind's signature", provider.sign(&json!({"alg": "RS256", "kid": "curve"}), &claims(), "RS256")),
        ("an algorithm off the list", provider.sign(&json!({"alg": "RS512", "kid": "rsa"}), &claims(), "RS256")),
        (
            "critical extension",
            provider.sign(&json!({"alg": "ES256", "kid": "curve", "crit": ["exp"]}), &claims(), "ES256"),
        ),
        (
            "own key in the head",
            other.sign(
                &json!({"alg": "ES256", "kid": "curve", "jwk": other.set("curve")["keys"][0]}),
                &claims(),
                "ES256",
            ),
        ),
        ("signed by another", other.sign(&es, &claims(), "ES256")),
        ("signed by another", other.sign(&rs, &claims(), "RS256")),
        ("other claims", swapped),
        ("over", with("exp", json!(now() - 10))),
        ("no end", with("exp", Value::Null)),
        ("an end that is no number", with("exp", json!("never"))),
        ("not yet", with("nbf", json!(now() + 100))),
        ("another audience", with("aud", json!("other"))),
        ("no audience", with("aud", Value::Null)),
        ("another issuer", with("iss", json!("https://evil.example"))),
        ("no issuer", with("iss", Value::Null)),
        ("an issuer in a list", with("iss", json!([ISSUER]))),
        ("no subject", with("sub", Value::Null)),
        ("two parts", cut(2)),
        ("four parts", format!("{good}.x")),
        ("no base64", "eyJ!.eyJ!.x".to_owned()),
        ("too long", with("pad", json!("x".repeat(9000)))),
    ];
    for (what, token) in bent {
        let answer = f.get("/v1/sessions", &token, "").await;
        assert!(matches!(status(&answer), 401 | 431), "{what}: {answer}");
    }
    assert_eq!(f.daemon.asked().len(), 1);
    // Within the leeway it is not over.
    assert_eq!(status(&f.get("/v1/sessions", &with("exp", json!(now() - 2)), "").await), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_pick_the_app_and_the_scopes_within_the_settings() {
    let provider = Provider::new();
    let (f, _directory) = trusting(&provider, |issuer| {
        issuer.app_claim = Some("pepo_app".into());
        issuer.scope_claim = Some("scope".into());
        issuer.scope_prefix = "pepo:".into();
    })
    .await;
    let code = async |app: Value, scope: Value, path: &str| {
        let claims = changed(changed(claims(), "pepo_app", app), "scope", scope);
        let token = provider.sign(&json!({"alg": "ES256", "kid": "curve"}), &claims, "ES256");
        status(&f.get(path, &token, "").await)
    };
    assert_eq!(code(json!("default"), json!("openid pepo:sessions:read"), "/v1/sessions").await, 200);
    assert_eq!(code(json!("default"), json!(["pepo:sessions:read"]), "/v1/sessions").await, 200);
    assert_eq!(code(json!("default"), json!("pepo:commands:run"), "/v1/sessions").await, 403);
    assert_eq!(
        code(json!("default"), json!("pepo:app:admin pepo:*"), "/v1/sessions").await,
        401,
        "more than the settings give"
    );
    assert_eq!(
        code(json!("default"), json!("sessions:read"), "/v1/sessions").await,
        401,
        "without the prefix it is not ours"
    );
    assert_eq!(code(json!("default"), Value::Null, "/v1/sessions").await, 401);
    assert_eq!(code(json!("nobody"), json!("pepo:sessions:read"), "/v1/sessions").await, 401);
    assert_eq!(code(Value::Null, json!("pepo:sessions:read"), "/v1/sessions").await, 401);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_remembered_token_is_not_slowed_down_by_others_failures_and_ends_with_its_app() {
    let provider = Provider::new();
    let directory = tempfile::tempdir().expect("directory");
    let keys = directory.path().join("keys.json");
    std::fs::write(&keys, provider.set("curve").to_string()).expect("write");
    let options =
        Options { issuers: vec![issuer(&keys)], failures: Rate { per_second: 1, burst: 3 }, ..Options::default() };
    let f = start(options).await;
    let token = provider.sign(&json!({"alg": "ES256", "kid": "curve"}), &claims(), "ES256");
    assert_eq!(status(&f.get("/v1/sessions", &token, "").await), 200);
    for _ in 0..8 {
        f.get("/v1/sessions", "eyJh.eyJz.x", "").await;
    }
    assert_eq!(status(&f.get("/v1/sessions", "eyJh.eyJz.x", "").await), 429);
    assert_eq!(status(&f.get("/v1/sessions", &token, "").await), 200);
    f.daemon.change(|state| state.apps.clear()).await;
    assert_ne!(status(&f.get("/v1/sessions", &token, "").await), 200);
}

/// A provider's web server: its settings and its keys, as they are now.
async fn serve(documents: std::sync::Arc<std::sync::Mutex<[String; 2]>>, listener: tokio::net::TcpListener) {
    loop {
        let (mut stream, _) = listener.accept().await.expect("accept");
        let mut head = vec![0; 4096];
        let read = stream.read(&mut head).await.unwrap_or(0);
        let of = usize::from(!head[..read].starts_with(b"GET /.well-known/openid-configuration "));
        let body = documents.lock().expect("lock")[of].clone();
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
        let _ = stream.write_all(answer.as_bytes()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_found_by_the_issuers_settings_and_got_again_when_a_new_one_signs() {
    let (provider, next) = (Provider::new(), Provider::new());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let own = format!("http://{}", listener.local_addr().expect("address"));
    let settings = json!({"issuer": own, "jwks_uri": format!("{own}/keys")}).to_string();
    let documents = std::sync::Arc::new(std::sync::Mutex::new([settings, provider.set("first").to_string()]));
    tokio::spawn(serve(documents.clone(), listener));
    let issuer = Issuer { issuer: own.clone(), keys: None, ..issuer(Path::new("/")) };
    let f = start(Options { issuers: vec![issuer], ..Options::default() }).await;
    let began = Instant::now();
    let token = |provider: &Provider, kid: &str| {
        provider.sign(&json!({"alg": "ES256", "kid": kid}), &changed(claims(), "iss", json!(own)), "ES256")
    };
    assert_eq!(status(&f.get("/v1/sessions", &token(&provider, "first"), "").await), 200);
    documents.lock().expect("lock")[1] = next.set("second").to_string();
    assert_eq!(status(&f.get("/v1/sessions", &token(&next, "second"), "").await), 401, "not asked for that soon");
    tokio::time::sleep(Duration::from_millis(10_500).saturating_sub(began.elapsed())).await;
    assert_eq!(status(&f.get("/v1/sessions", &token(&next, "second"), "").await), 200);
    let fresh = changed(changed(claims(), "iss", json!(own)), "jti", json!("another"));
    let withdrawn = provider.sign(&json!({"alg": "ES256", "kid": "first"}), &fresh, "ES256");
    assert_eq!(status(&f.get("/v1/sessions", &withdrawn, "").await), 401, "its key was withdrawn");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_issuer_that_is_away_is_no_fault_of_the_callers() {
    let provider = Provider::new();
    let (f, _directory) =
        trusting(&provider, |issuer| issuer.keys = Some(Place::File("/nonexistent/keys.json".into()))).await;
    let token = provider.sign(&json!({"alg": "ES256", "kid": "curve"}), &claims(), "ES256");
    let answer = f.get("/v1/sessions", &token, "").await;
    assert_eq!(status(&answer), 503, "{answer}");
    assert!(answer.contains("issuer"), "{answer}");
}

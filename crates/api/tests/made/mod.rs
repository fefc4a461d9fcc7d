//! Documents that are made from tables and types. `PEPO_BLESS=1` writes them anew.

use std::path::Path;

pub fn same_as(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    if std::env::var_os("PEPO_BLESS").is_some() {
        std::fs::write(&path, text).expect("write");
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == text,
        "docs/{name} is not what it is made from: \
         run PEPO_BLESS=1 cargo test -p pepo-api --features openapi --test openapi --test documents"
    );
}

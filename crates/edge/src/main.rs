//! edge
fn main() {}

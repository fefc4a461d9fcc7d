//! hostile
fn main() {}

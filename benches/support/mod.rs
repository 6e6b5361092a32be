//! What the benches share. `tests/bench_support.rs` tests it.

pub mod arenas;
pub mod random_allocations;
pub mod work;

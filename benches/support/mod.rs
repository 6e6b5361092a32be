//! What the benches share. `tests/bench_support.rs` tests it.

pub(crate) mod arenas;
pub(crate) mod contiguous;
pub(crate) mod random_allocations;
pub(crate) mod traces;
pub(crate) mod work;

//! A sequence of the pool's operations on the simulated device, beside a shadow allocator.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vrampool::testing::fuzz_pool(data));

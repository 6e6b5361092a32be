//! The buddy layer beside brute force.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vrampool::testing::fuzz_buddy(data));

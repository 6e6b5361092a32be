//! The reader of traces on any bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vrampool::trace::fuzz_reader(data));

//! The committed corpora of the fuzz targets, replayed without a fuzzer. `fuzz/fuzz_targets/` has the same calls.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Runs `target` on every file of a corpus and reports all that fail, by name.
fn replay(corpus: &str, target: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(corpus);
    let mut files: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("the folder can be read").path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    let failed: Vec<_> = files
        .iter()
        .filter(|file| {
            let data = fs::read(file).expect("the file can be read");
            catch_unwind(AssertUnwindSafe(|| target(&data))).is_err()
        })
        .collect();
    assert!(failed.is_empty(), "{} of {} inputs fail: {failed:#?}", failed.len(), files.len());
}

#[test]
fn pool() {
    replay("pool", vrampool::testing::fuzz_pool);
}

#[test]
fn trace() {
    replay("trace", vrampool::trace::fuzz_reader);
}

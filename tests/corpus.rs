//! The committed corpora of the fuzz targets, replayed without a fuzzer. `fuzz/fuzz_targets/` has the same calls.

use std::fs;
use std::path::Path;

/// Runs `target` on every file of a corpus, in the order of their names. The last name printed is that of the one that fails.
fn replay(corpus: &str, target: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(corpus);
    let mut files: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("the folder can be read").path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    for file in files {
        println!("{}", file.display());
        target(&fs::read(file).expect("the file can be read"));
    }
}

#[test]
fn pool() {
    replay("pool", vrampool::testing::fuzz_pool);
}

#[test]
fn trace() {
    replay("trace", vrampool::trace::fuzz_reader);
}

#[test]
fn buddy() {
    replay("buddy", vrampool::testing::fuzz_buddy);
}

#[test]
fn slab() {
    replay("slab", vrampool::testing::fuzz_slab);
}

//! The order of layers, checked: every `crate::`, `super::` and `self::` path under `src/` is resolved to the module it
//! leads to, and may only lead downwards. Also checked: where `unsafe` may stand, and that primitives of
//! synchronisation come from `crate::sync`.
//!
//! The checker reads sources, not a compiled crate, so it sees code behind every `cfg` at once.

mod checker;
mod order;
mod paths;
mod self_tests;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};
use tree::Tree;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("the folder can be read").path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The crate's own sources, each with its path from the repository's root.
fn sources() -> Vec<(String, String)> {
    let mut files = Vec::new();
    rust_files(&root().join("src"), &mut files);
    files.sort();
    files
        .into_iter()
        .map(|path| {
            let name = path.strip_prefix(root()).expect("the file lies in the repository");
            let name = name.to_str().expect("paths are UTF-8").replace('\\', "/");
            (name, fs::read_to_string(&path).expect("the file can be read"))
        })
        .collect()
}

fn report(violations: &[String]) {
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

#[test]
fn imports_go_downwards() {
    let tree = Tree::parse(sources()).unwrap_or_else(|errors| panic!("\n{}\n", errors.join("\n")));
    assert!(tree.files() > 5, "only {} files were read", tree.files());
    report(&checker::imports(&tree));
}

#[test]
fn synchronisation_comes_from_the_sync_module() {
    let tree = Tree::parse(sources()).unwrap_or_else(|errors| panic!("\n{}\n", errors.join("\n")));
    report(&checker::synchronisation(&tree));
}

#[test]
fn unsafe_stands_where_the_design_says() {
    let design = fs::read_to_string(root().join("DESIGN.md")).expect("DESIGN.md can be read");
    report(&checker::unsafety(&sources(), &design));
}

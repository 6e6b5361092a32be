//! The checker on small sources, so that it is known to find what it looks for.

use crate::checker;
use crate::tree::Tree;

/// A crate of three layers, with one more file or one file replaced.
fn sources(path: &str, text: &str) -> Vec<(String, String)> {
    let mut files = vec![
        (
            "src/lib.rs",
            "pub mod driver; pub mod error; pub mod pool; mod sync; pub mod testing; pub use error::Error; pub use pool::{Builder as PoolBuilder, Pool};",
        ),
        ("src/driver/mod.rs", "use crate::error::Error; pub mod sim;"),
        ("src/driver/sim.rs", "use super::Driver; use crate::Error;"),
        ("src/error.rs", ""),
        ("src/pool.rs", "use crate::{driver::{self, sim::Sim}, error::Error}; use super::driver::Driver;"),
        ("src/sync.rs", "pub(crate) use std::sync::Mutex; thread_local! { static A: u8 = 0; }"),
        ("src/testing.rs", "use crate::Pool;"),
        ("src/bin/program/main.rs", "mod table; use table::Table; use vrampool::Pool;"),
        ("src/bin/program/table.rs", "pub use crate::main; use std::sync::Mutex;"),
    ];
    files.retain(|(name, _)| *name != path);
    files.push((path, text));
    files.into_iter().map(|(name, text)| (name.to_owned(), text.to_owned())).collect()
}

fn parse(path: &str, text: &str) -> Tree {
    Tree::parse(sources(path, text)).expect("the sources hang together")
}

/// The violations of a low layer's file with this text.
fn imports(text: &str) -> Vec<String> {
    checker::imports(&parse("src/driver/sim.rs", text))
}

fn assert_one(violations: &[String], what: &str) {
    assert!(violations.len() == 1 && violations[0].contains(what), "wanted one violation with {what:?}, got {violations:#?}");
}

#[test]
fn imports_downwards_and_within_a_layer_pass() {
    for text in [
        "use super::Driver; use crate::Error;",
        "use crate::driver::sim; use self::inner::*; mod inner { use super::super::Driver; }",
        "/// See [`crate::pool::Pool`].\n//- crate::pool\nfn f() -> &'static str { \"crate::pool::Pool\" }",
        "use ::std::fmt; fn f(&self) { self.pool::<u8>(); let x = self as u64; }",
        "#[cfg(test)] mod tests { use super::*; use crate::testing::run; }",
        "#[cfg(all(test, feature = \"sim\"))] use crate::testing::run;",
    ] {
        assert_eq!(imports(text), [""; 0], "{text}");
    }
}

#[test]
fn imports_upwards_are_found() {
    for text in [
        "use crate::pool::Pool;",
        "use crate::{error::Error, pool::{Pool}};",
        "use {crate::error::Error, crate::pool as p};",
        "use super::super::pool::Pool;",
        "use crate::Pool;",
        "use crate::PoolBuilder;",
        "fn f() { crate::pool::new(); }",
        "fn f(pool: &crate::pool::Pool<u8>) {}",
        "type T = <u8 as crate::pool::Trait>::T;",
        "fn f() { format!(\"{}\", [crate::pool::NAME]); }",
        "macro_rules! m { () => { $crate::pool::new() }; }",
        "#[derive(crate::pool::Derive)] struct S;",
        "mod inner { fn f() { super::super::super::pool::new(); } }",
        "#[cfg(test)] mod tests { use crate::pool::Pool; }",
    ] {
        assert_one(&imports(text), "layer driver may not use pool");
    }
    for text in [
        "use crate::testing::run;",
        "#[cfg(not(test))] use crate::testing::run;",
        "#[cfg(any(test, feature = \"sim\"))] use crate::testing::run;",
    ] {
        assert_one(&imports(text), "layer driver may not use outside");
    }
}

#[test]
fn ways_round_the_rule_are_found() {
    for text in ["use crate::*;", "use crate as root;", "use crate::{self as root};", "use super::super::*;", "use super::super as root;"] {
        assert_one(&imports(text), "imports the whole crate");
    }
    assert_one(&imports("use vrampool::Pool;"), "begin with `crate`");
    assert_one(&imports("use crate::unheard::Of;"), "neither a top-level module nor re-exported");
    assert_one(&imports("use super::super::super::x;"), "leads out of the crate");
    assert_one(
        &checker::imports(&parse(
            "src/lib.rs",
            "mod driver; mod error; mod pool; mod sync; mod testing; pub use error::Error; pub use pool::Pool; mod odd {}",
        )),
        "module odd is in no layer",
    );
    let glob = "mod driver; mod error; mod pool; mod sync; mod testing; pub use error::Error; pub use pool::Pool; pub use driver::*;";
    assert_one(&checker::imports(&parse("src/lib.rs", glob)), "re-exports by name");
}

#[test]
fn a_violation_names_file_and_line() {
    assert_eq!(
        imports("\n\nuse crate::{\n    pool::Pool,\n};"),
        ["src/driver/sim.rs:4: `crate::pool::Pool`: layer driver may not use pool"]
    );
}

#[test]
fn files_that_no_module_leads_to_are_found() {
    for (path, text, what) in [
        ("src/odd.rs", "", "src/odd.rs: no `mod` leads here"),
        ("src/driver/mod.rs", "mod sim; mod lost;", "src/driver/lost.rs: declared as module driver::lost, but not there"),
        ("src/driver/sim.rs", "fn f( {", "src/driver/sim.rs:1:"),
        ("src/error.rs", "#[path = \"x.rs\"] mod odd;", "has a #[path]"),
    ] {
        assert_one(&Tree::parse(sources(path, text)).expect_err(path), what);
    }
}

#[test]
fn primitives_outside_the_sync_module_are_found() {
    let check = |text| checker::synchronisation(&parse("src/driver/sim.rs", text));
    for text in [
        "use std::sync::Mutex;",
        "use std::{fmt, sync::{Arc, atomic::AtomicU64}};",
        "use core::sync::atomic::AtomicU8;",
        "use ::std::sync::*;",
        "fn f() { std::sync::RwLock::new(0); }",
        "fn f() { vec![std::sync::Condvar::new()]; }",
    ] {
        assert_one(&check(text), "comes from `crate::sync`");
    }
    assert_one(&check("use std::sync;"), "import what is used");
    assert_one(&check("thread_local! { static A: u8 = 0; }"), "thread_local");
    for text in [
        "use std::sync::{Arc, OnceLock};",
        "use crate::sync::thread_local; thread_local! { static A: u8 = 0; }",
        "#[cfg(test)] mod tests { use std::sync::Mutex; }",
        "use crate::sync::Mutex;",
    ] {
        assert_eq!(check(text), [""; 0], "{text}");
    }
}

#[test]
fn unsafe_outside_the_listed_files_is_found() {
    let design =
        "# Design\n## Where unsafe stands\nWords.\n\n| file | why |\n|---|---|\n| `src/error.rs` | FFI |\n\n## Next\n| src/pool.rs | x |\n";
    let check = |text| checker::unsafety(&sources("src/error.rs", text), design);
    assert_eq!(check("fn f() { unsafe { g() } }"), [""; 0]);
    assert_one(
        &check("// unsafe\n#![deny(unsafe_code)] const A: &str = \"unsafe\";"),
        "lists src/error.rs under \"Where unsafe stands\", but no unsafe",
    );
    for text in [
        "fn f() { unsafe { g() } }",
        "unsafe fn f() {}",
        "unsafe impl Send for X {}",
        "m! { unsafe { g() } }",
        "#[unsafe(no_mangle)] fn f() {}",
    ] {
        let mut sources = sources("src/pool.rs", text);
        sources.retain(|(file, _)| file != "src/error.rs");
        sources.push(("src/error.rs".to_owned(), "unsafe fn f() {}".to_owned()));
        assert_one(&checker::unsafety(&sources, design), "src/pool.rs:1: DESIGN.md does not list this file");
    }
    assert_one(&checker::unsafety(&[], "# Design\n"), "has no section");
}

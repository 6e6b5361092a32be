//! The rules.

use crate::order::Layer;
use crate::paths::{self, Found};
use crate::tree::{Place, Tree};
use proc_macro2::TokenStream;
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

/// What a path leads to, from the crate's root: where the root's re-exports are followed, to what they re-export.
#[derive(Debug)]
enum Target {
    Layer(Layer),
    /// The root itself, by which everything can be reached.
    Root,
}

/// Checks that every path leads to the layer it stands in or to a lower one.
pub(crate) fn imports(tree: &Tree) -> Vec<String> {
    let mut violations: Vec<String> =
        tree.modules.iter().filter(|module| Layer::of(module).is_none()).map(|module| format!("module {module} is in no layer")).collect();
    let exports = exports(tree, &mut violations);
    for place in tree.places.iter().filter(|place| !place.program) {
        for found in paths::paths(place.tokens.clone(), &["vrampool"]) {
            violations.push(at(place, &found, "leads out of the crate and in again: begin with `crate`"));
        }
        // The root stands above all layers, and a module without a layer has been reported.
        let Some(own) = place.module.first().and_then(|module| Layer::of(module)) else { continue };
        for found in paths::paths(place.tokens.clone(), &["crate", "super", "self"]) {
            let Some(path) = absolute(&place.module, &found.segments) else {
                violations.push(at(place, &found, "leads out of the crate"));
                continue;
            };
            match target(&path, tree, &exports) {
                Ok(Target::Layer(layer)) if layer <= own => {}
                Ok(Target::Layer(_)) if place.test && path.first().is_some_and(|module| module == "testing") => {}
                Ok(Target::Layer(layer)) => {
                    violations.push(at(place, &found, &format!("layer {} may not use {}", own.name(), layer.name())))
                }
                Ok(Target::Root) => violations.push(at(place, &found, "imports the whole crate: name what is used")),
                Err(why) => violations.push(at(place, &found, &why)),
            }
        }
    }
    violations
}

/// The names that the root re-exports, each with the path it stands for.
fn exports(tree: &Tree, violations: &mut Vec<String>) -> BTreeMap<String, Vec<String>> {
    let mut exports = BTreeMap::new();
    let heads: Vec<&str> = tree.modules.iter().map(String::as_str).chain(["crate", "self"]).collect();
    for place in tree.places.iter().filter(|place| place.import && place.module.is_empty() && !place.program) {
        for found in paths::paths(place.tokens.clone(), &heads) {
            let Some(path) = absolute(&[], &found.segments) else { continue };
            if path.last().is_some_and(|last| last == "*") {
                violations.push(at(place, &found, "the root re-exports by name, so that each name's layer can be told"));
            } else if let Some(name) = found.alias.or_else(|| path.last().cloned()) {
                exports.insert(name, path);
            }
        }
    }
    exports
}

/// A path from the crate's root, or `None` where `super` leads above the root.
fn absolute(module: &[String], segments: &[String]) -> Option<Vec<String>> {
    let mut path = module.to_vec();
    for (index, segment) in segments.iter().enumerate() {
        match segment.as_str() {
            "crate" if index == 0 => path.clear(),
            "self" => {}
            "super" => {
                path.pop()?;
            }
            name => path.push(name.to_owned()),
        }
    }
    Some(path)
}

fn target(path: &[String], tree: &Tree, exports: &BTreeMap<String, Vec<String>>) -> Result<Target, String> {
    let Some(first) = path.first() else { return Ok(Target::Root) };
    if first == "*" {
        return Ok(Target::Root);
    }
    if tree.modules.contains(first) {
        return Layer::of(first).map(Target::Layer).ok_or_else(|| format!("module {first} is in no layer"));
    }
    match exports.get(first) {
        Some(exported) => target(exported, tree, &BTreeMap::new()),
        None => Err(format!("{first} is neither a top-level module nor re-exported by the root")),
    }
}

fn at(place: &Place, found: &Found, what: &str) -> String {
    format!("{}:{}: `{}`: {what}", place.file, found.line, found.text())
}

/// Names of `std::sync` that a model checker replaces.
const PRIMITIVES: &[&str] = &["atomic", "Mutex", "RwLock", "Condvar", "Barrier", "Once", "mpsc", "*", "self"];

/// Checks that primitives of synchronisation are named in `src/sync.rs` alone. Tests and programs may use the standard
/// library's.
pub(crate) fn synchronisation(tree: &Tree) -> Vec<String> {
    let mut violations = Vec::new();
    // The files that import the macro from there.
    let from_sync: BTreeSet<&str> = tree
        .places
        .iter()
        .filter(|place| {
            place.import && paths::paths(place.tokens.clone(), &["crate"]).iter().any(|found| found.text() == "crate::sync::thread_local")
        })
        .map(|place| place.file.as_str())
        .collect();
    for place in tree.places.iter().filter(|place| !place.program && !place.test && place.file != "src/sync.rs") {
        for found in paths::paths(place.tokens.clone(), &["std", "core"]) {
            let rest: Vec<&str> = found.segments.iter().skip(1).map(String::as_str).collect();
            match rest[..] {
                ["sync"] => violations.push(at(place, &found, "import what is used, from `crate::sync`")),
                ["sync", name, ..] if PRIMITIVES.contains(&name) => violations.push(at(place, &found, "comes from `crate::sync`")),
                _ => {}
            }
        }
        if !from_sync.contains(place.file.as_str()) {
            for line in paths::lines_of(place.tokens.clone(), "thread_local") {
                violations.push(format!("{}:{line}: `thread_local!` comes from `crate::sync`", place.file));
            }
        }
    }
    violations
}

/// The heading of the table that [`unsafety`] reads.
const SECTION: &str = "Where unsafe stands";

/// Checks that `unsafe` stands in the files that the design lists, and in each of them.
pub(crate) fn unsafety(sources: &[(String, String)], design: &str) -> Vec<String> {
    let mut violations = Vec::new();
    let Some(listed) = listed(design) else { return vec![format!("DESIGN.md has no section \"{SECTION}\"")] };
    let mut seen = BTreeSet::new();
    for (file, text) in sources {
        match TokenStream::from_str(text) {
            Ok(tokens) => {
                let lines = paths::lines_of(tokens, "unsafe");
                if !lines.is_empty() {
                    seen.insert(file.as_str());
                }
                if !listed.contains(file) {
                    violations
                        .extend(lines.iter().map(|line| format!("{file}:{line}: DESIGN.md does not list this file under \"{SECTION}\"")));
                }
            }
            Err(error) => violations.push(format!("{file}: {error}")),
        }
    }
    violations.extend(
        listed
            .iter()
            .filter(|file| !seen.contains(file.as_str()))
            .map(|file| format!("DESIGN.md lists {file} under \"{SECTION}\", but no unsafe is there")),
    );
    violations
}

/// The files in the first column of the section's table, or `None` where there is no such section.
fn listed(design: &str) -> Option<BTreeSet<String>> {
    let mut lines = design.lines().skip_while(|line| !(line.starts_with('#') && line.trim_start_matches('#').trim() == SECTION));
    lines.next()?;
    Some(
        lines
            .take_while(|line| !line.starts_with('#'))
            .filter_map(|line| line.trim().strip_prefix('|')?.split('|').next())
            .map(|cell| cell.trim().trim_matches('`').to_owned())
            .filter(|cell| cell.ends_with(".rs"))
            .collect(),
    )
}

//! The tree of modules, from the declarations in the sources.

use proc_macro2::TokenStream;
use quote::ToTokens;
use std::collections::{BTreeMap, BTreeSet};
use syn::{Attribute, Item};

/// An item that is not a module, in its place.
#[derive(Debug)]
pub(crate) struct Place {
    /// The file it stands in.
    pub(crate) file: String,
    /// The module it stands in, from the crate's root.
    pub(crate) module: Vec<String>,
    /// Whether only tests see it.
    pub(crate) test: bool,
    /// Whether it belongs to a program rather than the library.
    pub(crate) program: bool,
    /// What it is made of.
    pub(crate) tokens: TokenStream,
    /// Whether it is an import.
    pub(crate) import: bool,
}

/// Every item under `src/`.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    pub(crate) places: Vec<Place>,
    /// The library's top-level modules.
    pub(crate) modules: BTreeSet<String>,
    files: usize,
}

/// A file to be read: its name, the module it holds, whether only tests see it, whether a program's.
struct Pending {
    file: String,
    module: Vec<String>,
    test: bool,
    program: bool,
}

impl Tree {
    /// Reads the sources, given by path and text, from the crate's roots down.
    ///
    /// # Errors
    /// One line for each file that cannot be parsed, that a declaration asks for and that is not there, or that no
    /// declaration leads to.
    pub(crate) fn parse(sources: Vec<(String, String)>) -> Result<Self, Vec<String>> {
        let mut sources: BTreeMap<String, String> = sources.into_iter().collect();
        let mut tree = Self { files: sources.len(), ..Self::default() };
        let mut errors = Vec::new();
        let mut pending: Vec<Pending> = sources
            .keys()
            .filter(|file| is_root(file))
            .map(|file| Pending { file: file.clone(), module: Vec::new(), test: false, program: file != "src/lib.rs" })
            .collect();
        while let Some(next) = pending.pop() {
            let Some(text) = sources.remove(&next.file) else {
                errors.push(format!("{}: declared as module {}, but not there", next.file, next.module.join("::")));
                continue;
            };
            match syn::parse_file(&text) {
                Ok(file) => {
                    tree.place(&next, file.attrs.into_iter().map(ToTokens::into_token_stream).collect(), false);
                    tree.items(file.items, &next, &mut pending, &mut errors, &sources);
                }
                Err(error) => errors.push(format!("{}:{}: {error}", next.file, error.span().start().line)),
            }
        }
        errors.extend(sources.keys().map(|file| format!("{file}: no `mod` leads here")));
        if errors.is_empty() { Ok(tree) } else { Err(errors) }
    }

    pub(crate) fn files(&self) -> usize {
        self.files
    }

    fn place(&mut self, at: &Pending, tokens: TokenStream, import: bool) {
        self.places.push(Place { file: at.file.clone(), module: at.module.clone(), test: at.test, program: at.program, tokens, import });
    }

    fn items(
        &mut self,
        items: Vec<Item>,
        at: &Pending,
        pending: &mut Vec<Pending>,
        errors: &mut Vec<String>,
        sources: &BTreeMap<String, String>,
    ) {
        for item in items {
            let Item::Mod(module) = item else {
                let test = at.test || attributes(&item).iter().any(is_test);
                let import = matches!(item, Item::Use(_));
                let here = Pending { file: at.file.clone(), module: at.module.clone(), test, program: at.program };
                self.place(&here, item.into_token_stream(), import);
                continue;
            };
            let name = module.ident.to_string();
            if module.attrs.iter().any(|attribute| attribute.path().is_ident("path")) {
                errors.push(format!("{}: module {name} has a #[path], which this test does not follow", at.file));
                continue;
            }
            if at.module.is_empty() && !at.program {
                self.modules.insert(name.clone());
            }
            let mut path = at.module.clone();
            path.push(name);
            let test = at.test || module.attrs.iter().any(is_test);
            let mut inner = Pending { file: at.file.clone(), module: path, test, program: at.program };
            match module.content {
                Some((_, items)) => self.items(items, &inner, pending, errors, sources),
                None => {
                    inner.file = file_of(&inner.module, &at.file, sources);
                    pending.push(inner);
                }
            }
        }
    }
}

fn is_root(file: &str) -> bool {
    let program = |rest: &str| !rest.contains('/') || (rest.ends_with("/main.rs") && rest.matches('/').count() == 1);
    file == "src/lib.rs" || file == "src/main.rs" || file.strip_prefix("src/bin/").is_some_and(program)
}

/// The file of a module declared in `parent`: `name/mod.rs` where that is there, else `name.rs`.
fn file_of(module: &[String], parent: &str, sources: &BTreeMap<String, String>) -> String {
    let base = match parent.strip_prefix("src/bin/").and_then(|rest| rest.split_once('/')) {
        Some((program, _)) => format!("src/bin/{program}"),
        None => "src".to_owned(),
    };
    let stem = format!("{base}/{}", module.join("/"));
    let folder = format!("{stem}/mod.rs");
    if sources.contains_key(&folder) { folder } else { format!("{stem}.rs") }
}

/// Whether the attribute is `#[cfg(test)]`, `#[cfg(all(test, …))]` or `#[test]`.
fn is_test(attribute: &Attribute) -> bool {
    if attribute.path().is_ident("test") {
        return true;
    }
    if !attribute.path().is_ident("cfg") {
        return false;
    }
    let mut test = false;
    // What cannot be read as a list of conditions is not one that this test has to know.
    let _ = attribute.parse_nested_meta(|meta| {
        if meta.path.is_ident("test") {
            test = true;
        } else if meta.path.is_ident("all") {
            meta.parse_nested_meta(|inner| {
                test |= inner.path.is_ident("test");
                skip(inner.input)
            })?;
            return Ok(());
        }
        skip(meta.input)
    });
    test
}

/// Skips to the next comma of a list of conditions.
fn skip(input: syn::parse::ParseStream<'_>) -> syn::Result<()> {
    while !input.is_empty() && !input.peek(syn::Token![,]) {
        input.parse::<proc_macro2::TokenTree>()?;
    }
    Ok(())
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

//! Paths as they stand in a stream of tokens: in imports, expressions, types, attributes and the bodies of macros alike.

use proc_macro2::{Delimiter, Ident, Spacing, TokenStream, TokenTree};

/// A path that begins with one of the heads asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    /// The segments, the head included; the last is `*` for a glob.
    pub(crate) segments: Vec<String>,
    /// The name that an import gives it with `as`.
    pub(crate) alias: Option<String>,
    /// The line on which the path begins.
    pub(crate) line: usize,
}

impl Found {
    pub(crate) fn text(&self) -> String {
        self.segments.join("::")
    }
}

/// Every path in `tokens` that begins with one of `heads`, trees of imports flattened. A head alone counts where it is
/// renamed (`crate as root`).
pub(crate) fn paths(tokens: TokenStream, heads: &[&str]) -> Vec<Found> {
    let mut found = Vec::new();
    collect(tokens, heads, &mut found);
    found
}

fn collect(tokens: TokenStream, heads: &[&str], found: &mut Vec<Found>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Group(group) => collect(group.stream(), heads, found),
            TokenTree::Ident(ident) if heads.iter().any(|head| ident == head) && !follows_separator(&tokens, at) => {
                let line = ident.span().start().line;
                if separator(&tokens, at + 1) {
                    at = path(&tokens, at, Vec::new(), line, found);
                    continue;
                }
                if let Some(alias) = alias(&tokens, at + 1) {
                    found.push(Found { segments: vec![ident.to_string()], alias: Some(alias), line });
                }
            }
            _ => {}
        }
        at += 1;
    }
}

/// Reads a path or a tree of imports from `at` on and returns where it ends. A brace or a generic argument after `::`
/// is left to the caller unless it is a tree of imports.
fn path(tokens: &[TokenTree], mut at: usize, mut segments: Vec<String>, line: usize, found: &mut Vec<Found>) -> usize {
    loop {
        match tokens.get(at) {
            Some(TokenTree::Ident(ident)) => {
                segments.push(plain(ident));
                at += 1;
            }
            Some(TokenTree::Punct(punct)) if punct.as_char() == '*' => {
                segments.push("*".to_owned());
                at += 1;
            }
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                branches(group.stream(), &segments, found);
                return at + 1;
            }
            // `::<`, or a fragment of a macro such as `$name`.
            _ => break,
        }
        if !separator(tokens, at) {
            break;
        }
        at += 2;
    }
    found.push(Found { segments, alias: alias(tokens, at), line });
    at
}

fn branches(tokens: TokenStream, prefix: &[String], found: &mut Vec<Found>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for branch in tokens.split(|token| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ',')) {
        let Some(first) = branch.first() else { continue };
        path(branch, 0, prefix.to_vec(), first.span().start().line, found);
    }
}

fn plain(ident: &Ident) -> String {
    let text = ident.to_string();
    text.strip_prefix("r#").map_or(text.clone(), str::to_owned)
}

/// The name behind an `as` at `at`.
fn alias(tokens: &[TokenTree], at: usize) -> Option<String> {
    match (tokens.get(at), tokens.get(at + 1)) {
        (Some(TokenTree::Ident(word)), Some(TokenTree::Ident(name))) if word == "as" => Some(plain(name)),
        _ => None,
    }
}

/// Whether a `::` begins at `at`.
fn separator(tokens: &[TokenTree], at: usize) -> bool {
    matches!(
        (tokens.get(at), tokens.get(at + 1)),
        (Some(TokenTree::Punct(first)), Some(TokenTree::Punct(second)))
            if first.as_char() == ':' && first.spacing() == Spacing::Joint && second.as_char() == ':'
    )
}

/// Whether the token at `at` is a later segment of a path. In an absolute path (`::std`) a keyword or nothing stands
/// before the `::`.
fn follows_separator(tokens: &[TokenTree], at: usize) -> bool {
    const KEYWORDS: &[&str] = &["use", "as", "in", "return", "dyn", "impl", "mut", "for", "else", "match", "if", "while"];
    at >= 3 && separator(tokens, at - 2) && matches!(&tokens[at - 3], TokenTree::Ident(ident) if !KEYWORDS.iter().any(|word| ident == word))
}

/// The lines on which the word stands in `tokens`, as an identifier or a keyword.
pub(crate) fn lines_of(tokens: TokenStream, word: &str) -> Vec<usize> {
    let mut lines = Vec::new();
    for token in tokens {
        match token {
            TokenTree::Group(group) => lines.extend(lines_of(group.stream(), word)),
            TokenTree::Ident(ident) if ident == word => lines.push(ident.span().start().line),
            _ => {}
        }
    }
    lines
}

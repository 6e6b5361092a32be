//! Recorded traces as works.

use super::work::{Event, Work};
use std::path::{Path, PathBuf};
use vrampool::trace::{Action, Trace};

/// Reads traces, as works too, from files, and from folders their compressed traces in the order of their names.
///
/// # Errors
/// A sentence that names the file or folder.
pub(crate) fn read_all(paths: &[PathBuf]) -> Result<Vec<(Work, Trace)>, String> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let entries =
            path.read_dir().and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut found: Vec<_> = entries.into_iter().map(|entry| entry.path()).filter(|path| is_trace(path)).collect();
        if found.is_empty() {
            return Err(format!("{} has no trace", path.display()));
        }
        found.sort();
        files.append(&mut found);
    }
    files.iter().map(|file| read(file)).collect()
}

fn is_trace(path: &Path) -> bool {
    path.to_str().is_some_and(|name| name.ends_with(".csv.gz"))
}

/// A trace under the name of its file, without the endings.
fn read(path: &Path) -> Result<(Work, Trace), String> {
    let trace = Trace::open(path).map_err(|error| error.to_string())?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let work = Work { name: name.trim_end_matches(".gz").trim_end_matches(".csv").to_owned(), events: events(&trace) };
    Ok((work, trace))
}

/// The allocations that succeeded when the trace was recorded, and the frees.
fn events(trace: &Trace) -> Vec<Event> {
    // A trace gives a block's number again once the block is freed.
    let mut current = vec![0; trace.blocks()];
    let mut allocations = 0;
    let mut events = Vec::with_capacity(trace.events().len());
    for event in trace.events() {
        match (event.action(), event.block()) {
            (Action::Allocate, Some(block)) => {
                current[block] = allocations;
                allocations += 1;
                events.push(Event::Allocate(event.size()));
            }
            (Action::Free, Some(block)) => events.push(Event::Free(current[block])),
            _ => {}
        }
    }
    events
}

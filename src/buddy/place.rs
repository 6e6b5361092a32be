//! Where memory is mapped when no free run fits: the choice of a window.
//!
//! A window is a stretch of free grains and unmapped pages, long enough for the request. Mapping costs time, so the best
//! window needs the fewest unmapped pages; then it puts the least of the request on them, and so leaves the most of them
//! free, in one piece; then it has the lowest address. Where memory is scarce, the best takes the fewest whole pages first,
//! mapped or not: a whole free page can be moved to where it is needed, what is left of a broken one cannot.
//!
//! As a window slides over a stretch, what it needs changes only where one of its ends crosses an edge between free and
//! unmapped, so only windows that begin or end at an edge are looked at: those at the longest free runs and at the
//! holes between pages, at most [`CANDIDATES`] of each unless the search is exhaustive.

use super::{Run, tree::RunTree};
use crate::arena::{Arena, GRAIN_BYTES, Pages};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// How many free runs, and how many holes, are looked at.
const CANDIDATES: usize = 64;

/// A stretch that could be mapped for a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Window {
    /// What the request gets.
    pub(crate) run: Run,
    /// The unmapped pages under it, lowest first.
    pub(crate) missing: Vec<Pages>,
    /// How many pages that is.
    pub(crate) missing_pages: u32,
    /// How many whole free pages it takes besides.
    whole_pages: u32,
    /// How many of its grains lie on unmapped pages. The others use up what is free.
    new_grains: u32,
    /// Whether all of it is to be one new handle.
    pub(crate) one_handle: bool,
}

/// How far to look for a window, and for which.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Search {
    /// Among a bounded number, for the one that takes the least time: with the fewest pages to be mapped.
    Quick,
    /// Among a bounded number, for the one that takes the least memory: with the fewest pages that could serve others.
    Thrifty,
    /// Among all, for the one that takes the least memory.
    Exhaustive,
}

/// What is looked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shape {
    /// Grains in the run.
    pub(crate) grains: u32,
    /// What its address must be a multiple of, in bytes: a power of two.
    pub(crate) alignment: u64,
    /// Whether it must lie on one handle.
    pub(crate) one_handle: bool,
    /// The grain that it must begin at; `None` where any place will do.
    pub(crate) at: Option<u32>,
}

/// The windows for a request, best first; empty where only new addresses help.
pub(crate) fn windows(arena: &Arena, tree: &RunTree, shape: Shape, search: Search) -> Vec<Window> {
    if let Some(start) = shape.at {
        return measure(arena, tree, Run { start, len: shape.grains }).into_iter().collect();
    }
    if shape.one_handle {
        return window_for_one_handle(arena, shape).into_iter().collect();
    }
    let limit = if search == Search::Exhaustive { usize::MAX } else { CANDIDATES };
    let mut starts = Vec::new();
    let mut edges = |begin: u32, end: u32| starts.extend(ends(arena, Run { start: begin, len: end - begin }, shape));
    for run in longest_runs(tree, limit) {
        edges(run.start, run.end());
    }
    let page_grains = arena.page_grains();
    let mut seen = 0;
    arena.visit_holes(|hole| {
        let (begin, end) = (hole.first * page_grains, hole.end() * page_grains);
        edges(begin, end);
        edges(tree.run_before(begin).start, tree.run_after(end).end());
        seen += 1;
        seen < limit
    });
    let mut starts: Vec<u32> = starts.into_iter().flatten().collect();
    starts.sort_unstable();
    starts.dedup();
    let mut windows: Vec<Window> =
        starts.into_iter().filter_map(|start| measure(arena, tree, Run { start, len: shape.grains }).ok()).collect();
    windows.sort_by_key(|window| {
        let first = if search == Search::Quick { 0 } else { window.missing_pages + window.whole_pages };
        (first, window.missing_pages, window.new_grains, window.run.start)
    });
    windows
}

/// The lowest pages that one new handle for the request can be mapped at: none of the free grains beside them is of use, since
/// they are on other handles.
fn window_for_one_handle(arena: &Arena, shape: Shape) -> Option<Window> {
    let page_grains = arena.page_grains();
    let count = shape.grains.div_ceil(page_grains);
    let mut found = None;
    arena.visit_holes(|hole| {
        // Pages are aligned to their size, so that an aligned start is a page's.
        let start = arena.align_up(hole.first * page_grains, shape.alignment);
        found = start.filter(|start| start / page_grains + count <= hole.end());
        found.is_none()
    });
    let run = Run { start: found?, len: shape.grains };
    let missing = vec![Pages { first: run.start / page_grains, count }];
    Some(Window { run, missing, missing_pages: count, whole_pages: 0, new_grains: shape.grains, one_handle: true })
}

/// The aligned starts with which a run of this shape lies at one end of a stretch, or would if it were long enough: the last
/// before that end and the first behind it, which are the same where any start is aligned.
pub(super) fn ends(arena: &Arena, stretch: Run, shape: Shape) -> [Option<u32>; 4] {
    let slack = (shape.alignment / GRAIN_BYTES).saturating_sub(1) as u32;
    // From a region before this one, the address is another.
    let is_aligned = |&start: &u32| arena.align_up(start, shape.alignment) == Some(start);
    let behind = |start: u32| arena.align_up(start, shape.alignment).filter(is_aligned);
    let before = |start: u32| behind(start.checked_sub(slack)?);
    let last = stretch.end().checked_sub(shape.grains);
    [behind(stretch.start), before(stretch.start), last.and_then(behind), last.and_then(before)]
}

/// The longest free runs, at most `limit`, in no order.
fn longest_runs(tree: &RunTree, limit: usize) -> Vec<Run> {
    let mut heap = BinaryHeap::new();
    tree.visit(1, |run| {
        heap.push(Reverse((run.len, Reverse(run.start))));
        if heap.len() > limit {
            heap.pop();
        }
        true
    });
    heap.into_iter().map(|Reverse((len, Reverse(start)))| Run { start, len }).collect()
}

/// What a window needs.
///
/// # Errors
/// The first grain that is neither free nor unmapped.
pub(super) fn measure(arena: &Arena, tree: &RunTree, run: Run) -> Result<Window, u32> {
    let page_grains = arena.page_grains();
    let page = |page: u32| Run { start: page * page_grains, len: page_grains };
    run.start.checked_add(run.len).ok_or(run.start)?;
    let (mut at, mut missing, mut missing_pages, mut whole_pages, mut new_grains) = (run.start, Vec::new(), 0, 0, 0);
    while at < run.end() {
        let free = tree.run_after(at);
        if !free.is_empty() {
            let end = free.end().min(run.end());
            // Pages that are broken at an end of the window count where they are wholly free now.
            let (first, last) = (at / page_grains, (end - 1) / page_grains);
            whole_pages += last + 1 - first;
            whole_pages -= u32::from(!tree.is_free(page(first)));
            whole_pages -= u32::from(last > first && !tree.is_free(page(last)));
            at = end;
            continue;
        }
        let wanted = run.end().div_ceil(page_grains) - at / page_grains;
        let hole = arena.hole_from(at / page_grains);
        let count = hole.count.min(wanted);
        if count == 0 {
            return Err(at);
        }
        let end = (hole.first + count) * page_grains;
        new_grains += end.min(run.end()) - at;
        missing_pages += count;
        missing.push(Pages { first: hole.first, count });
        at = end;
    }
    Ok(Window { run, missing, missing_pages, whole_pages, new_grains, one_handle: false })
}

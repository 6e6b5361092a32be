//! **Buddy layer**: large requests — free runs over the arena's pages, split and merged.
//!
//! ```text
//! request ── take ──► lowest free run that fits (tree) ──► block
//!        └── windows ► where pages would have to be mapped (place)
//! block  ── give ───► the run is free again, merged with its neighbours
//! ```
//!
//! # Invariants, each in `Buddy::check`
//! - B1 A grain is free only on a mapped page. Grains of pages that work is under way on are in nobody's reach: a window
//!   leaves the tree whole before the lock drops.
//! - B2 Free and taken grains on mapped pages add up to the mapped bytes.
//!
//! # Concurrency
//! Everything here is guarded by the owner's lock, and nothing here calls the driver.
//!
//! # What it does not do
//! It keeps no record of who took a run: that is in the directory.

pub mod classic;
mod directory;
mod place;
pub mod tree;

pub(crate) use directory::{Directory, Owner};
pub(crate) use place::{Shape, Window};

use crate::arena::{Arena, GRAIN_BYTES, Handle, Pages, Site, Work};
use crate::sync::Arc;
use std::fmt;
use tree::RunTree;

/// A stretch of neighbouring grains.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Run {
    /// Its first grain.
    pub start: u32,
    /// How many grains it has.
    pub len: u32,
}

impl Run {
    /// The grain behind its last.
    #[must_use]
    pub const fn end(self) -> u32 {
        self.start + self.len
    }

    /// Whether it has no grain.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Whether it has this grain.
    #[must_use]
    pub const fn contains(self, grain: u32) -> bool {
        self.start <= grain && grain < self.end()
    }
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "grains {}..{}", self.start, self.end())
    }
}

/// The free runs of one pool and the arena under them. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Buddy {
    pub(crate) arena: Arena,
    tree: RunTree,
    pub(crate) directory: Directory,
}

impl Buddy {
    pub(crate) fn new(site: Arc<Site>) -> Self {
        Self { arena: Arena::new(site), tree: RunTree::new(), directory: Directory::default() }
    }

    /// Bytes mapped and free.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.tree.free_grains() * GRAIN_BYTES
    }

    /// The longest free stretch, in bytes.
    pub(crate) fn largest_free_bytes(&self) -> u64 {
        u64::from(self.tree.longest()) * GRAIN_BYTES
    }

    /// Takes a free run of this shape: the lowest that fits. No driver call could give one sooner.
    pub(crate) fn take(&mut self, shape: Shape) -> Option<Run> {
        let start = if shape.one_handle {
            self.first_fit_on_one_handle(shape)?
        } else if shape.alignment <= GRAIN_BYTES {
            self.tree.first_fit(shape.grains)?
        } else {
            let mut aligned = None;
            self.tree.visit(shape.grains, |run| {
                aligned =
                    self.arena.align_up(run.start, shape.alignment).filter(|&start| start < run.end() && run.end() - start >= shape.grains);
                aligned.is_none()
            });
            aligned?
        };
        let run = Run { start, len: shape.grains };
        self.tree.remove(run);
        Some(run)
    }

    /// Where the lowest free run of this shape begins that lies on one handle.
    fn first_fit_on_one_handle(&self, shape: Shape) -> Option<u32> {
        let page_grains = self.arena.page_grains();
        let mut handles: Vec<Run> = self.arena.handles().map(|(_, handle)| grains_of(handle.pages, page_grains)).collect();
        handles.retain(|handle| handle.len >= shape.grains);
        handles.sort_unstable_by_key(|handle| handle.start);
        let mut found = None;
        self.tree.visit(shape.grains, |run| {
            let first = handles.partition_point(|handle| handle.end() <= run.start);
            found = handles[first..].iter().take_while(|handle| handle.start < run.end()).find_map(|handle| {
                let start = self.arena.align_up(run.start.max(handle.start), shape.alignment)?;
                let end = if cfg!(vrampool_fault = "across_handles") { run.end() } else { run.end().min(handle.end()) };
                (start.checked_add(shape.grains)? <= end).then_some(start)
            });
            found.is_none()
        });
        found
    }

    /// Makes a taken run free.
    pub(crate) fn give(&mut self, run: Run) {
        self.tree.insert(run);
    }

    /// Whether a grain is on a mapped page and taken.
    pub(crate) fn is_taken(&self, grain: u32) -> bool {
        let page = grain / self.arena.page_grains();
        self.arena.hole_from(page).count == 0 && self.tree.run_after(grain).is_empty()
    }

    /// Where pages could be mapped for a request, best first.
    pub(crate) fn windows(&self, shape: Shape, exhaustive: bool) -> Vec<Window> {
        place::windows(&self.arena, &self.tree, shape, exhaustive)
    }

    /// Whether a hole has at least this many pages.
    pub(crate) fn has_hole(&self, pages: u64) -> bool {
        let mut found = false;
        self.arena.visit_holes(|hole| {
            found = u64::from(hole.count) >= pages;
            !found
        });
        found
    }

    /// Takes a window's free parts out of the tree and begins to map what is missing under it, and `extra` pages
    /// behind it where they are a hole.
    pub(crate) fn begin_map(&mut self, window: &Window, extra: u32, handle_pages: Option<u32>) -> (Work, Vec<Run>) {
        let mut parts = Vec::new();
        let mut at = window.run.start;
        while at < window.run.end() {
            let free = self.tree.run_after(at);
            let part = Run { start: at, len: free.len.min(window.run.end() - at) };
            if part.is_empty() {
                // Pages that are to be mapped: their other grains are in no run.
                at = (at / self.arena.page_grains() + 1) * self.arena.page_grains();
                continue;
            }
            self.tree.remove(part);
            parts.push(part);
            at = part.end();
        }
        let mut missing = window.missing.clone();
        if let Some(last) = missing.last_mut() {
            let behind = self.arena.hole_from(last.end());
            last.count += behind.count.min(extra);
        }
        (self.arena.begin_map(&missing, handle_pages), parts)
    }

    /// Books finished work: what is mapped now becomes free, but for `keep`, which stays taken. Whether anything is.
    pub(crate) fn settle(&mut self, work: Work, keep: Run) -> bool {
        let mapped = self.arena.settle(work);
        for &pages in &mapped {
            let (head, tail) = outside(grains_of(pages, self.arena.page_grains()), keep);
            self.tree.insert(head);
            if !cfg!(vrampool_fault = "lost_tail") {
                self.tree.insert(tail);
            }
        }
        !mapped.is_empty()
    }

    /// The handles whose every grain is free and of which no page lies under `spare`, with their bytes; highest
    /// address first.
    pub(crate) fn idle_handles(&self, spare: Option<&Window>) -> Vec<(u32, u64)> {
        let page_grains = self.arena.page_grains();
        let mut idle: Vec<(u32, Handle)> = self
            .arena
            .handles()
            .map(|(index, &handle)| (index, handle))
            .filter(|(_, handle)| {
                let run = grains_of(handle.pages, page_grains);
                let apart = spare.is_none_or(|window| run.end() <= window.run.start || window.run.end() <= run.start);
                apart && self.tree.is_free(run)
            })
            .collect();
        idle.sort_unstable_by_key(|(_, handle)| std::cmp::Reverse(handle.pages.first));
        idle.into_iter().map(|(index, handle)| (index, handle.bytes)).collect()
    }

    /// Takes idle handles' grains out of the tree and begins to give them back.
    pub(crate) fn begin_release(&mut self, handles: &[u32]) -> Work {
        let page_grains = self.arena.page_grains();
        for handle in handles.iter().filter_map(|&index| self.arena.handle(index)) {
            self.tree.remove(grains_of(handle.pages, page_grains));
        }
        self.arena.begin_release(handles)
    }

    /// Checks B1, B2 and the layers below, at a moment when no work is under way. `taken` is how many grains the layers
    /// above hold.
    ///
    /// # Errors
    /// The first violation found.
    pub(crate) fn check(&self, taken: u64) -> Result<(), String> {
        self.tree.check()?;
        self.arena.check()?;
        let page_grains = self.arena.page_grains();
        let (mut mapped, mut free_on_pages) = (0, 0);
        for (_, handle) in self.arena.handles() {
            let run = grains_of(handle.pages, page_grains);
            mapped += u64::from(run.len);
            let mut at = run.start;
            while at < run.end() {
                let free = self.tree.run_after(at).len.min(run.end() - at);
                free_on_pages += u64::from(free);
                at += free.max(1);
            }
        }
        if free_on_pages != self.tree.free_grains() {
            return Err(format!("B1: {} grains are free, {free_on_pages} of them on mapped pages", self.tree.free_grains()));
        }
        if self.tree.free_grains() + taken != mapped {
            return Err(format!("B2: {} grains are free and {taken} taken, {mapped} are mapped", self.tree.free_grains()));
        }
        Ok(())
    }
}

/// The grains of pages.
pub(crate) fn grains_of(pages: Pages, page_grains: u32) -> Run {
    Run { start: pages.first * page_grains, len: pages.count * page_grains }
}

/// The parts of a run before and behind `keep`.
fn outside(run: Run, keep: Run) -> (Run, Run) {
    let head_end = keep.start.clamp(run.start, run.end());
    let tail_start = keep.end().clamp(head_end, run.end());
    (Run { start: run.start, len: head_end - run.start }, Run { start: tail_start, len: run.end() - tail_start })
}

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
mod fill;
#[cfg(feature = "testing")]
mod oracle;
mod place;
pub mod tree;

pub(crate) use directory::{Directory, Owner};
pub(crate) use fill::{Filling, Idle, fill};
#[cfg(feature = "testing")]
pub(crate) use oracle::fuzz_buddy;
pub(crate) use place::{Search, Shape, Window};

use crate::arena::{Arena, GRAIN_BYTES, Pages, Part, Site, Work};
use crate::sync::{Arc, is_planted};
use std::cmp::Reverse;
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
    /// Grains that the layers above have.
    taken: u64,
}

impl Buddy {
    pub(crate) fn new(site: Arc<Site>) -> Self {
        Self { arena: Arena::new(site), tree: RunTree::new(), directory: Directory::default(), taken: 0 }
    }

    /// Bytes mapped and free.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.tree.free_grains() * GRAIN_BYTES
    }

    /// The longest free stretch, in bytes.
    pub(crate) fn largest_free_bytes(&self) -> u64 {
        u64::from(self.tree.longest()) * GRAIN_BYTES
    }

    /// Takes a free run of this shape: the lowest that fits, or, where memory is `scarce`, what breaks the fewest whole free
    /// pages, since these could be moved, and of that the tightest. No driver call could give one sooner.
    pub(crate) fn take(&mut self, shape: Shape, scarce: bool) -> Option<Run> {
        let start = if let Some(at) = shape.at {
            (self.tree.run_after(at).len >= shape.grains).then_some(at)?
        } else if shape.one_handle {
            self.first_fit_on_one_handle(shape)?
        } else if scarce {
            self.thriftiest_fit(shape)?
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
        self.taken += u64::from(run.len);
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

    /// Where a run of this shape begins that breaks the fewest whole free pages: in the shortest such free run, the lowest.
    fn thriftiest_fit(&self, shape: Shape) -> Option<u32> {
        let mut best: Option<((u32, u32), u32)> = None;
        self.tree.visit(shape.grains, |run| {
            let ends = place::ends(&self.arena, run, shape).into_iter().flatten();
            for start in ends.filter(|&start| run.start <= start && start <= run.end() - shape.grains) {
                let (head, tail) = outside(run, Run { start, len: shape.grains });
                let broken = self.whole_pages(run) - self.whole_pages(head) - self.whole_pages(tail);
                if best.is_none_or(|(least, _)| (broken, run.len) < least) {
                    best = Some(((broken, run.len), start));
                }
            }
            true
        });
        best.map(|(_, start)| start)
    }

    /// How many whole pages lie in a run.
    fn whole_pages(&self, run: Run) -> u32 {
        let page_grains = self.arena.page_grains();
        (run.end() / page_grains).saturating_sub(run.start.div_ceil(page_grains))
    }

    /// Makes a taken run free.
    pub(crate) fn give(&mut self, run: Run) {
        self.tree.insert(run);
        self.taken -= u64::from(run.len);
    }

    /// Grains that the layers above have.
    pub(crate) fn taken_grains(&self) -> u64 {
        self.taken
    }

    /// Whether a grain is on a mapped page and taken.
    pub(crate) fn is_taken(&self, grain: u32) -> bool {
        let page = grain / self.arena.page_grains();
        self.arena.hole_from(page).count == 0 && self.tree.run_after(grain).is_empty()
    }

    /// Where pages could be mapped for a request, best first.
    pub(crate) fn windows(&self, shape: Shape, search: Search) -> Vec<Window> {
        place::windows(&self.arena, &self.tree, shape, search)
    }

    /// The first grain of a run that is neither free nor unmapped.
    pub(crate) fn obstacle(&self, run: Run) -> Option<u32> {
        place::measure(&self.arena, &self.tree, run).err()
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

    /// Takes a window's free parts out of the tree, and idle handles that are to be moved, and begins to map `parts` under
    /// it. Returns the window's free parts as well.
    pub(crate) fn begin_map(&mut self, window: &Window, parts: &[Part]) -> (Work, Vec<Run>) {
        let page_grains = self.arena.page_grains();
        let mut free_parts = Vec::new();
        let mut at = window.run.start;
        while at < window.run.end() {
            let free = self.tree.run_after(at);
            let part = Run { start: at, len: free.len.min(window.run.end() - at) };
            if part.is_empty() {
                // Pages that are to be mapped: their other grains are in no run.
                at = (at / page_grains + 1) * page_grains;
                continue;
            }
            self.tree.remove(part);
            free_parts.push(part);
            at = part.end();
        }
        for part in parts {
            if let Part::Moved { handle, .. } = *part
                && !is_planted("moved_grains_stay_free")
                && let Some(handle) = self.arena.handle(handle)
            {
                self.tree.remove(grains_of(handle.pages, page_grains));
            }
        }
        (self.arena.begin_map(parts), free_parts)
    }

    /// Puts back free parts of a window that was not mapped.
    pub(crate) fn put_back(&mut self, parts: &[Run]) {
        for &part in parts {
            self.tree.insert(part);
        }
    }

    /// Books finished work: what is mapped now becomes free, but for `keep`, which stays taken. Whether anything is.
    pub(crate) fn settle(&mut self, work: Work, keep: Run) -> bool {
        let mapped = self.arena.settle(work);
        self.taken += u64::from(keep.len);
        for &pages in &mapped {
            let (head, tail) = outside(grains_of(pages, self.arena.page_grains()), keep);
            self.tree.insert(head);
            if !cfg!(vrampool_fault = "lost_tail") {
                self.tree.insert(tail);
            }
        }
        !mapped.is_empty()
    }

    /// The handles of which every grain is free and no page lies under `spare`: the largest first, since that takes the fewest
    /// calls, and of these the highest, since the lowest free runs are used first.
    pub(crate) fn idle_handles(&self, spare: Option<&Window>) -> Vec<Idle> {
        let page_grains = self.arena.page_grains();
        let spare = spare.map_or(Run::default(), |window| window.run);
        let mut idle = Vec::new();
        self.tree.visit(page_grains, |run| {
            // The planted fault overlooks the taken grains of the last page.
            let last =
                if cfg!(vrampool_fault = "idle_with_live_grain") { run.end().div_ceil(page_grains) } else { run.end() / page_grains };
            let (mut page, end) = (run.start.div_ceil(page_grains), last);
            while page < end {
                let Some((index, handle)) = self.arena.handle_at(page) else { break };
                let grains = grains_of(handle.pages, page_grains);
                let apart = grains.end() <= spare.start || spare.end() <= grains.start;
                if handle.pages.first == page && handle.pages.end() <= end && apart {
                    idle.push(Idle { handle: index, pages: handle.pages, bytes: handle.bytes });
                }
                page = handle.pages.end();
            }
            true
        });
        idle.sort_unstable_by_key(|idle| Reverse((idle.pages.count, idle.pages.first)));
        idle
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
        if taken != self.taken {
            return Err(format!("B2: {} grains are counted as taken, {taken} are", self.taken));
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

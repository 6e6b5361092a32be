//! The classic binary buddy allocator: the baseline that the pool's own core is measured against. The pool does not use
//! it.
//!
//! It serves a range of grains, numbered from 0. A *block* of order `k` is `2^k` grains and starts at a multiple of `2^k`;
//! the two halves of a block are *buddies*. A request is rounded up to a power of two and gets the lowest block of the
//! smallest order that has a free block large enough, halved until it fits. A block that is freed is joined with its
//! buddy as long as that is free too.
//!
//! ```text
//! order 3   |               8               |     A range of 14 grains: top blocks 8 + 4 + 2. After allocate(1):
//! order 2   |       4       |       4       |     0 is live; 1, 2..4 and 4..8 are free halves; 8..12 and
//! order 1   |   2   |   2   |                     12..14 are free and whole.
//! order 0   | 1 | 1 |
//! ```
//!
//! With [`Tails::GivenBack`] a request keeps only the grains it asked for: 33 of a block of 64 return the 31 behind them as
//! blocks of 1, 2, 4, 8 and 16. That cures the rounding; what a buddy allocator cannot cure is that a free stretch which
//! does not start at a multiple of its size counts only in pieces.
//!
//! # Invariants
//! - **I1** Free blocks and live allocations are disjoint and cover the range: `live + free == grains`.
//! - **I2** A free block is aligned to its size and lies in the range.
//! - **I3** No two free blocks are buddies. The free blocks are therefore a function of what is live, whatever the order
//!   of frees.
//!
//! # Concurrency
//! None of its own: a [`ClassicBuddy`] is plain data.
//!
//! # Complexity
//! [`allocate`](ClassicBuddy::allocate) and [`free`](ClassicBuddy::free) take O(log grains · log blocks). Memory grows with
//! the number of blocks, not with the range.

use crate::error::InvalidFree;
use std::collections::{BTreeMap, BTreeSet};

/// What becomes of the grains between a request and the power of two above it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Tails {
    /// They belong to the allocation and are lost until it is freed.
    #[default]
    Kept,
    /// They are free blocks at once.
    GivenBack,
}

/// A live allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Live {
    /// What it takes of the range, in grains.
    grains: u64,
    /// What was asked for, in grains.
    requested: u64,
}

/// A binary buddy allocator over a range of grains.
///
/// # Examples
/// ```
/// use vrampool::buddy::classic::{ClassicBuddy, Tails};
///
/// let mut buddy = ClassicBuddy::new(64, Tails::Kept);
/// assert_eq!(buddy.allocate(33), Some(0));
/// assert_eq!(buddy.allocate(1), None);
/// assert_eq!(buddy.free(0), Ok(64));
///
/// let mut buddy = ClassicBuddy::new(64, Tails::GivenBack);
/// assert_eq!(buddy.allocate(33), Some(0));
/// assert_eq!(buddy.allocate(16), Some(48));
/// assert_eq!(buddy.allocate(1), Some(33));
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClassicBuddy {
    grains: u64,
    tails: Tails,
    /// The offsets of the free blocks, by order.
    free: Vec<BTreeSet<u64>>,
    /// The live allocations by offset.
    live: BTreeMap<u64, Live>,
    live_grains: u64,
    requested_grains: u64,
}

/// What a [`ClassicBuddy`] holds, in grains. `live + free` is the range.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Statistics {
    /// The range.
    pub grains: u64,
    /// Grains asked for by live allocations.
    pub requested: u64,
    /// Grains that live allocations take.
    pub live: u64,
    /// Grains in free blocks.
    pub free: u64,
    /// The largest free block.
    pub largest_free: u64,
    /// How many allocations are live.
    pub allocations: usize,
}

impl ClassicBuddy {
    /// An allocator with nothing live. A range that is no power of two is made of the powers of two of its binary digits,
    /// largest first: 48 grains are blocks of 32 and 16.
    #[must_use]
    pub fn new(grains: u64, tails: Tails) -> Self {
        let mut buddy = Self {
            grains,
            tails,
            free: vec![BTreeSet::new(); u64::BITS as usize],
            live: BTreeMap::new(),
            live_grains: 0,
            requested_grains: 0,
        };
        for (offset, order) in blocks(0, grains) {
            buddy.free[order].insert(offset);
        }
        buddy
    }

    /// Allocates `grains` grains and returns the offset of the first, or `None` where no free block is large enough. A
    /// request for 0 grains gets `None`.
    ///
    /// The offset is a multiple of the request rounded up to a power of two.
    ///
    /// # Complexity
    /// O(log grains · log blocks).
    pub fn allocate(&mut self, grains: u64) -> Option<u64> {
        let rounded = grains.checked_next_power_of_two().filter(|_| grains > 0)?;
        let wanted = rounded.trailing_zeros() as usize;
        let found = (wanted..self.free.len()).find(|&order| !self.free[order].is_empty())?;
        let offset = self.free[found].pop_first()?;
        for order in wanted..found {
            self.free[order].insert(offset + (1 << order));
        }
        let kept = match self.tails {
            Tails::Kept => rounded,
            Tails::GivenBack => grains,
        };
        for (tail, order) in blocks(offset + kept, offset + rounded) {
            self.free[order].insert(tail);
        }
        self.live.insert(offset, Live { grains: kept, requested: grains });
        self.live_grains += kept;
        self.requested_grains += grains;
        Some(offset)
    }

    /// Frees the allocation that starts at `offset` and returns how many grains it took.
    ///
    /// # Errors
    /// [`InvalidFree::Foreign`] for an offset outside the range, [`InvalidFree::Interior`] for one inside a live allocation,
    /// [`InvalidFree::NotLive`] for one in free memory. Nothing changes.
    ///
    /// # Complexity
    /// O(log grains · log blocks).
    pub fn free(&mut self, offset: u64) -> Result<u64, InvalidFree> {
        let Some(live) = self.live.remove(&offset) else { return Err(self.why_not_free(offset)) };
        self.live_grains -= live.grains;
        self.requested_grains -= live.requested;
        for (offset, order) in blocks(offset, offset + live.grains) {
            self.release(offset, order);
        }
        Ok(live.grains)
    }

    #[cold]
    fn why_not_free(&self, offset: u64) -> InvalidFree {
        match self.live.range(..offset).next_back() {
            _ if offset >= self.grains => InvalidFree::Foreign,
            Some((start, live)) if offset - start < live.grains => InvalidFree::Interior,
            _ => InvalidFree::NotLive,
        }
    }

    /// Makes a block free and joins it with its buddy as often as that is free. A block's buddy above the range, or
    /// across two top blocks, is never in a free list of that order, so no block outgrows its top block.
    fn release(&mut self, mut offset: u64, mut order: usize) {
        while self.free[order].remove(&(offset ^ (1 << order))) {
            offset &= !(1 << order);
            order += 1;
        }
        self.free[order].insert(offset);
    }

    /// What is live and free now.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        Statistics {
            grains: self.grains,
            requested: self.requested_grains,
            live: self.live_grains,
            free: self.grains - self.live_grains,
            largest_free: self.free.iter().rposition(|offsets| !offsets.is_empty()).map_or(0, |order| 1 << order),
            allocations: self.live.len(),
        }
    }

    /// The free blocks as `(offset, grains)`, by order and then by offset.
    pub fn free_blocks(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.free.iter().enumerate().flat_map(|(order, offsets)| offsets.iter().map(move |&offset| (offset, 1 << order)))
    }

    /// The live allocations as `(offset, grains taken)`, by offset.
    pub fn live_blocks(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.live.iter().map(|(&offset, live)| (offset, live.grains))
    }

    /// Checks the invariants of the [module](self).
    ///
    /// # Errors
    /// A sentence that names the invariant and the block.
    ///
    /// # Complexity
    /// O(blocks · log blocks).
    pub fn check(&self) -> Result<(), String> {
        let mut parts: Vec<(u64, u64)> = self.free_blocks().chain(self.live_blocks()).collect();
        parts.sort_unstable();
        let mut end = 0;
        for (offset, grains) in parts {
            if offset != end || grains == 0 {
                return Err(format!("I1: {grains} grains stand at {offset}, and the ones before end at {end}"));
            }
            end += grains;
        }
        if end != self.grains {
            return Err(format!("I1: the range has {} grains, but blocks cover {end}", self.grains));
        }
        for (offset, grains) in self.free_blocks() {
            if offset % grains != 0 || offset + grains > self.grains {
                return Err(format!("I2: the free block of {grains} at {offset}"));
            }
            if self.free[grains.trailing_zeros() as usize].contains(&(offset ^ grains)) {
                return Err(format!("I3: the free blocks of {grains} at {offset} and {} are buddies", offset ^ grains));
            }
        }
        let live: u64 = self.live.values().map(|live| live.grains).sum();
        let requested: u64 = self.live.values().map(|live| live.requested).sum();
        if (live, requested) != (self.live_grains, self.requested_grains) {
            return Err(format!("I1: counted {live} live, {requested} requested; noted {}, {}", self.live_grains, self.requested_grains));
        }
        Ok(())
    }
}

/// The largest aligned blocks that `start..end` is made of, lowest first, each with its order.
fn blocks(start: u64, end: u64) -> impl Iterator<Item = (u64, usize)> {
    let mut at = start;
    std::iter::from_fn(move || {
        let left = (end - at).checked_ilog2()?;
        let order = at.trailing_zeros().min(left);
        let offset = at;
        at += 1 << order;
        Some((offset, order as usize))
    })
}

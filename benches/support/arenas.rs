//! Memory as a pool over a classic buddy allocator takes it: arenas of a fixed size, taken on demand and kept.

use std::collections::BTreeSet;
use vrampool::buddy::classic::{ClassicBuddy, Tails};

/// The smallest block, in bytes.
const GRAIN: u64 = 256;
/// What an arena takes of the driver; a larger request gets one of the next power of two.
const ARENA_BYTES: u64 = 64 << 20;

/// Arenas with a classic buddy allocator each.
#[derive(Debug)]
pub(crate) struct Arenas {
    tails: Tails,
    arenas: Vec<ClassicBuddy>,
    /// The arenas by the order of their largest free block; full arenas are in none.
    by_largest: [BTreeSet<usize>; 64],
    reserved_bytes: u64,
}

/// Where a block lies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Block {
    arena: usize,
    grain: u64,
}

impl Arenas {
    /// No arena.
    pub(crate) fn new(tails: Tails) -> Self {
        Self { tails, arenas: Vec::new(), by_largest: [const { BTreeSet::new() }; 64], reserved_bytes: 0 }
    }

    /// Allocates in the first arena that has a block large enough, or in a new one.
    pub(crate) fn allocate(&mut self, bytes: u64) -> Block {
        let grains = bytes.div_ceil(GRAIN).max(1);
        let wanted = grains.next_power_of_two().trailing_zeros() as usize;
        let arena = self.by_largest[wanted..].iter().filter_map(BTreeSet::first).min().copied().unwrap_or_else(|| self.grow(grains));
        let grain = self.change(arena, |buddy| buddy.allocate(grains)).expect("the arena's largest block is large enough");
        Block { arena, grain }
    }

    /// Frees a block.
    pub(crate) fn free(&mut self, block: Block) {
        self.change(block.arena, |buddy| buddy.free(block.grain)).expect("the block is live");
    }

    /// What all arenas take together.
    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes
    }

    /// Where a block lies in the arena's bytes, for a check of overlaps: the arena, the first byte.
    pub(crate) fn place(block: Block) -> (usize, u64) {
        (block.arena, block.grain * GRAIN)
    }

    /// Whether every arena is in order, and in the set where it belongs.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (index, arena) in self.arenas.iter().enumerate() {
            arena.check().map_err(|why| format!("arena {index}: {why}"))?;
            let sets: Vec<usize> = (0..64).filter(|&order| self.by_largest[order].contains(&index)).collect();
            let largest: Vec<usize> = arena.statistics().largest_free.checked_ilog2().map(|order| order as usize).into_iter().collect();
            if sets != largest {
                return Err(format!("arena {index} has a largest block of orders {largest:?} and is listed under {sets:?}"));
            }
        }
        Ok(())
    }

    #[cold]
    fn grow(&mut self, grains: u64) -> usize {
        let bytes = (grains.next_power_of_two() * GRAIN).max(ARENA_BYTES);
        self.reserved_bytes += bytes;
        self.arenas.push(ClassicBuddy::new(bytes / GRAIN, self.tails));
        let index = self.arenas.len() - 1;
        self.by_largest[(bytes / GRAIN).ilog2() as usize].insert(index);
        index
    }

    /// Changes an arena and keeps the sets right.
    fn change<T>(&mut self, index: usize, change: impl FnOnce(&mut ClassicBuddy) -> T) -> T {
        let arena = &mut self.arenas[index];
        let before = arena.statistics().largest_free;
        let result = change(arena);
        let after = arena.statistics().largest_free;
        if before != after {
            if let Some(order) = before.checked_ilog2() {
                self.by_largest[order as usize].remove(&index);
            }
            if let Some(order) = after.checked_ilog2() {
                self.by_largest[order as usize].insert(index);
            }
        }
        result
    }
}

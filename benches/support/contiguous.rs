//! What an allocator could do at best that has one stretch of memory and moves nothing: first fit and best fit, with exact
//! sizes.

use std::collections::{BTreeMap, BTreeSet};

/// What sizes are rounded up to, in bytes.
pub(crate) const GRAIN: u64 = 256;
/// Free runs are sorted into so many lists for each doubling of their length.
const LISTS: u64 = 8;

/// Which of the free runs that are long enough is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Choice {
    /// The lowest.
    First,
    /// The shortest; the lowest of these.
    Best,
}

/// A stretch of grains.
#[derive(Debug)]
pub(crate) struct Contiguous {
    choice: Choice,
    /// Free runs: their lengths by their starts.
    free: BTreeMap<u64, u64>,
    /// The same by length and start.
    by_length: BTreeSet<(u64, u64)>,
    /// The starts of the same, sorted by length into lists.
    lists: Vec<BTreeSet<u64>>,
    /// Live blocks: their lengths by their starts.
    live: BTreeMap<u64, u64>,
}

/// The list of a length: a longer run is in the same or a later one.
fn list(length: u64) -> usize {
    let order = u64::from(length.ilog2());
    let part = if order < 3 { 0 } else { (length >> (order - 3)) & (LISTS - 1) };
    (order * LISTS + part) as usize
}

impl Contiguous {
    /// One free run of so many grains.
    pub(crate) fn new(grains: u64, choice: Choice) -> Self {
        let lists = vec![BTreeSet::new(); 64 * LISTS as usize];
        let mut new = Self { choice, free: BTreeMap::new(), by_length: BTreeSet::new(), lists, live: BTreeMap::new() };
        new.insert(0, grains);
        new
    }

    /// The start of so many grains, or `None` where no free run is long enough.
    pub(crate) fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let grains = bytes.div_ceil(GRAIN).max(1);
        let start = match self.choice {
            Choice::Best => self.by_length.range((grains, 0)..).next()?.1,
            Choice::First => {
                let own = list(grains);
                let longer = self.lists[own + 1..].iter().filter_map(BTreeSet::first).min().copied();
                let lower = self.lists[own].iter().copied().take_while(|&start| longer.is_none_or(|longer| start < longer));
                lower.into_iter().find(|start| self.free[start] >= grains).or(longer)?
            }
        };
        let length = self.remove(start);
        self.insert(start + grains, length - grains);
        self.live.insert(start, grains);
        Some(start)
    }

    /// Frees the block at `start`.
    pub(crate) fn free(&mut self, start: u64) {
        let (mut from, mut length) = (start, self.live.remove(&start).expect("the block is live"));
        if self.free.contains_key(&(start + length)) {
            length += self.remove(start + length);
        }
        if let Some((&before, &other)) = self.free.range(..start).next_back().filter(|&(&before, &other)| before + other == start) {
            self.remove(before);
            (from, length) = (before, length + other);
        }
        self.insert(from, length);
    }

    /// The free runs, as starts and lengths.
    pub(crate) fn free_runs(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.free.iter().map(|(&start, &length)| (start, length))
    }

    fn insert(&mut self, start: u64, length: u64) {
        if length > 0 {
            self.free.insert(start, length);
            self.by_length.insert((length, start));
            self.lists[list(length)].insert(start);
        }
    }

    fn remove(&mut self, start: u64) -> u64 {
        let length = self.free.remove(&start).expect("a free run");
        self.by_length.remove(&(length, start));
        self.lists[list(length)].remove(&start);
        length
    }
}

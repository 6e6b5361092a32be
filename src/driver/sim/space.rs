//! Free ranges of addresses, and the values that stand for handles.

use std::collections::{BTreeMap, BTreeSet};

/// The free part of an address space. Taking and giving back are O(log n), but for alignments above those in use.
#[derive(Debug)]
pub(super) struct Space {
    /// Free ranges, start to length; no two touch.
    by_start: BTreeMap<u64, u64>,
    /// The same as (length, start).
    by_length: BTreeSet<(u64, u64)>,
}

impl Space {
    pub(super) fn new(start: u64, bytes: u64) -> Self {
        let mut space = Self { by_start: BTreeMap::new(), by_length: BTreeSet::new() };
        space.insert(start, bytes);
        space
    }

    fn insert(&mut self, start: u64, bytes: u64) {
        if bytes > 0 {
            self.by_start.insert(start, bytes);
            self.by_length.insert((bytes, start));
        }
    }

    fn remove(&mut self, start: u64, bytes: u64) {
        self.by_start.remove(&start);
        self.by_length.remove(&(bytes, start));
    }

    /// Takes `bytes` bytes at an address that is `phase` more than a multiple of `alignment`: the shortest free range
    /// that fits, the lowest among equals. So what was just freed is what the next request of its size gets.
    pub(super) fn take(&mut self, bytes: u64, alignment: u64, phase: u64) -> Option<u64> {
        let fit = |&(length, start): &(u64, u64)| {
            let address = start.checked_sub(phase)?.checked_next_multiple_of(alignment)? + phase;
            let end = address.checked_add(bytes)?;
            (end <= start + length).then_some((start, length, address))
        };
        let (start, length, address) = self.by_length.range((bytes, 0)..).find_map(fit)?;
        self.remove(start, length);
        self.insert(start, address - start);
        self.insert(address + bytes, start + length - address - bytes);
        Some(address)
    }

    /// Gives a range back.
    pub(super) fn give(&mut self, mut start: u64, mut bytes: u64) {
        if let Some((&before, &length)) = self.by_start.range(..start).next_back() {
            debug_assert!(before + length <= start, "a range is given back once");
            if before + length == start {
                self.remove(before, length);
                start = before;
                bytes += length;
            }
        }
        if let Some(&length) = self.by_start.get(&(start + bytes)) {
            self.remove(start + bytes, length);
            bytes += length;
        }
        self.insert(start, bytes);
    }
}

/// Values that stand for things: `base`, `base + 16`, …
#[derive(Debug)]
pub(super) struct Table<T> {
    base: u64,
    reuse: bool,
    entries: Vec<Option<T>>,
    free: Vec<usize>,
}

const STEP: u64 = 16;

impl<T> Table<T> {
    pub(super) fn new(base: u64, reuse: bool) -> Self {
        Self { base, reuse, entries: Vec::new(), free: Vec::new() }
    }

    pub(super) fn insert(&mut self, entry: T) -> u64 {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.entries.push(None);
                self.entries.len() - 1
            }
        };
        self.entries[index] = Some(entry);
        self.base + STEP * index as u64
    }

    fn index(&self, value: u64) -> Option<usize> {
        let distance = value.checked_sub(self.base)?;
        distance.is_multiple_of(STEP).then(|| usize::try_from(distance / STEP).ok())?
    }

    /// Whether the value was ever handed out.
    pub(super) fn was_issued(&self, value: u64) -> bool {
        self.index(value).is_some_and(|index| index < self.entries.len())
    }

    pub(super) fn get(&self, value: u64) -> Option<&T> {
        self.entries.get(self.index(value)?)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, value: u64) -> Option<&mut T> {
        let index = self.index(value)?;
        self.entries.get_mut(index)?.as_mut()
    }

    pub(super) fn remove(&mut self, value: u64) -> Option<T> {
        let index = self.index(value)?;
        let entry = self.entries.get_mut(index)?.take()?;
        if self.reuse {
            self.free.push(index);
        }
        Some(entry)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.entries.iter().enumerate().filter_map(|(index, entry)| Some((self.base + STEP * index as u64, entry.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_ranges_merge_whatever_the_order() {
        let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
        for order in orders {
            let mut space = Space::new(0x1000, 0x3000);
            let taken: Vec<u64> = (0..3).map(|_| space.take(0x1000, 0x1000, 0).unwrap()).collect();
            assert_eq!(taken, [0x1000, 0x2000, 0x3000]);
            assert_eq!(space.take(1, 1, 0), None);
            for index in order {
                space.give(taken[index], 0x1000);
            }
            assert_eq!(space.take(0x3000, 0x1000, 0), Some(0x1000), "{order:?}");
        }
    }

    #[test]
    fn alignment_and_phase_are_kept_and_the_cut_off_part_stays_free() {
        let mut space = Space::new(0x100, 0x10000);
        assert_eq!(space.take(0x800, 0x1000, 0), Some(0x1000));
        assert_eq!(space.take(0x200, 0x200, 0x100), Some(0x100));
        assert_eq!(space.take(0x10000, 1, 0), None);
    }

    #[test]
    fn the_latest_free_value_comes_back_only_where_reuse_is_on() {
        for reuse in [true, false] {
            let mut table = Table::new(0x40, reuse);
            let first = table.insert('a');
            let second = table.insert('b');
            assert_eq!((first, second), (0x40, 0x50));
            assert_eq!(table.remove(first), Some('a'));
            assert_eq!(table.remove(first), None);
            assert_eq!(table.remove(0x41), None);
            assert_eq!(table.remove(0), None);
            assert_eq!(table.insert('c') == first, reuse);
            assert_eq!(table.iter().count(), 2);
        }
    }
}

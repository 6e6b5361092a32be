//! Size classes: which slot size serves which request.
//!
//! 256, 512, 768 and 1024 bytes, then four classes for each doubling, up to 64 KiB: 28 in all. A request loses at most
//! a fifth of its slot above 1 KiB.

use crate::arena::GRAIN_BYTES;
use crate::units::{KIB, MIN_ALIGNMENT};

/// How many classes there are.
pub(crate) const CLASSES: usize = 28;
/// The largest request that a slab serves, in bytes.
pub(crate) const MAX_SLOT_BYTES: u64 = 64 * KIB;
/// The smallest slab, in bytes.
const MIN_SLAB_BYTES: u64 = 64 * KIB;
/// A slab has at least this many slots.
const MIN_SLOTS: u64 = 8;

/// A size class: all slots of a slab have its size.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Class(u8);

impl Class {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..CLASSES as u8).map(Self)
    }

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }

    /// The class with the smallest slots that hold `size` bytes at multiples of `alignment` (a power of two); `None`
    /// where no class does. Takes O(1) for an alignment of 256 or less.
    pub(crate) fn of(size: u64, alignment: u64) -> Option<Self> {
        if size > MAX_SLOT_BYTES || alignment > GRAIN_BYTES {
            return None;
        }
        let units = size.max(1).div_ceil(MIN_ALIGNMENT) as u32;
        let index = if units <= 4 {
            units - 1
        } else {
            // 2^k < units <= 2^(k + 1); the classes in between lie 2^(k - 2) units apart.
            let k = (units - 1).ilog2();
            let step = 1 << (k - 2);
            4 + (k - 2) * 4 + (units - (1 << k)).div_ceil(step) - 1
        };
        // Slabs begin at multiples of a grain, so a slot is as aligned as its size is.
        (index as u8..CLASSES as u8).map(Self).find(|class| alignment <= MIN_ALIGNMENT || class.slot_bytes().is_multiple_of(alignment))
    }

    /// Bytes in a slot.
    pub(crate) const fn slot_bytes(self) -> u64 {
        let index = self.0 as u64;
        if index < 4 {
            return (index + 1) * MIN_ALIGNMENT;
        }
        let (doubling, step) = ((index - 4) / 4, (index - 4) % 4 + 1);
        ((4 + step) << doubling) * MIN_ALIGNMENT
    }

    /// Bytes in a slab: a power of two.
    pub(crate) const fn slab_bytes(self) -> u64 {
        let wanted = (self.slot_bytes() * MIN_SLOTS).next_power_of_two();
        if wanted > MIN_SLAB_BYTES { wanted } else { MIN_SLAB_BYTES }
    }

    /// Grains in a slab.
    pub(crate) const fn slab_grains(self) -> u32 {
        (self.slab_bytes() / GRAIN_BYTES) as u32
    }

    /// Slots in a slab.
    pub(crate) const fn slots(self) -> u32 {
        (self.slab_bytes() / self.slot_bytes()) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Vec<u64> {
        let mut sizes = vec![256, 512, 768, 1024];
        while sizes.last() < Some(&MAX_SLOT_BYTES) {
            let base = *sizes.last().unwrap();
            sizes.extend((1..=4).map(|step| base + step * base / 4));
        }
        sizes
    }

    #[test]
    fn the_classes_are_four_for_each_doubling() {
        assert_eq!(Class::all().map(Class::slot_bytes).collect::<Vec<_>>(), table());
        assert_eq!(table().len(), CLASSES);
    }

    #[test]
    fn every_size_gets_the_smallest_slot_that_holds_it() {
        let table = table();
        for size in 0..=1 << 20 {
            let expected = table.iter().position(|&slot| slot >= size);
            for alignment in [1, 2, 128, 256] {
                assert_eq!(Class::of(size, alignment).map(Class::index), expected, "{size}");
            }
        }
        for size in (20..64).flat_map(|k| [(1u64 << k) - 1, 1 << k, (1 << k) + 1]).chain([u64::MAX - 1, u64::MAX]) {
            assert_eq!(Class::of(size, 256), None, "{size}");
        }
    }

    #[test]
    fn every_alignment_gets_slots_at_its_multiples() {
        for size in (0..=MAX_SLOT_BYTES).step_by(64).chain([1, 255, 257]) {
            for shift in 0..=14 {
                let alignment = 1u64 << shift;
                let class = Class::of(size, alignment).expect("64 KiB is a multiple of every alignment to 16 KiB");
                assert!(class.slot_bytes() >= size && class.slot_bytes().is_multiple_of(alignment.min(class.slot_bytes())));
                let smaller = Class::all().find(|c| c.slot_bytes() >= size && c.slot_bytes().is_multiple_of(alignment.max(256)));
                assert_eq!(Some(class), smaller, "{size} at {alignment}");
            }
            assert_eq!(Class::of(size, 32 * KIB), None);
        }
    }

    #[test]
    fn slabs_are_powers_of_two_with_eight_slots_or_more() {
        for class in Class::all() {
            assert!(class.slab_bytes().is_power_of_two() && class.slab_bytes() >= 64 * KIB && class.slots() >= 8, "{class:?}");
            assert!(u64::from(class.slots()) * class.slot_bytes() <= class.slab_bytes());
            assert!(class.slab_bytes() == 64 * KIB || class.slab_bytes() / 2 < 8 * class.slot_bytes());
            assert_eq!(u64::from(class.slab_grains()) * GRAIN_BYTES, class.slab_bytes());
        }
        assert_eq!(Class::all().map(Class::slots).max(), Some(256));
    }
}

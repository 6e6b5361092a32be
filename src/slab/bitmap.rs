//! Which slots of a slab are free: one bit a slot.

/// A set of free slots. Words with trailing-zero counts: on maps of a few words they take a third of the time of a
/// general bit vector.
#[derive(Clone, Debug)]
pub(crate) struct Bitmap {
    /// A set bit is a free slot. Bits past the last slot are clear.
    words: Box<[u64]>,
    free: u32,
}

impl Bitmap {
    /// `slots` free slots (at least one).
    pub(crate) fn new(slots: u32) -> Self {
        let mut words = vec![u64::MAX; slots.div_ceil(64) as usize].into_boxed_slice();
        let past = words.len() as u32 * 64 - slots;
        if past > 0 && !cfg!(vrampool_fault = "slot_past_end") {
            let last = words.len() - 1;
            words[last] >>= past;
        }
        let free = words.iter().map(|word| word.count_ones()).sum();
        Self { words, free }
    }

    /// How many slots are free.
    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    /// Takes the lowest free slot.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let word = self.words.iter().position(|&word| word != 0)?;
        let bit = self.words[word].trailing_zeros();
        self.words[word] &= self.words[word] - 1;
        self.free -= 1;
        Some(word as u32 * 64 + bit)
    }

    /// Gives a taken slot back.
    pub(crate) fn give(&mut self, slot: u32) {
        debug_assert!(!self.is_free(slot), "slot {slot} is free already");
        self.words[slot as usize / 64] |= 1 << (slot % 64);
        self.free += 1;
    }

    /// Whether a slot is free.
    pub(crate) fn is_free(&self, slot: u32) -> bool {
        self.words[slot as usize / 64] >> (slot % 64) & 1 == 1
    }

    /// How many bits are set, counted anew: the same as [`Bitmap::free`] unless something is wrong.
    pub(crate) fn count(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bitvec::prelude::*;

    #[test]
    fn every_slot_count_hands_out_each_slot_once() {
        for slots in (1..=520).chain([1023, 1024, 1025, 4095, 4096]) {
            let mut map = Bitmap::new(slots);
            let mut oracle: BitVec = bitvec![1; slots as usize];
            assert_eq!(map.free(), slots);
            while let Some(slot) = map.take() {
                assert_eq!(oracle.first_one(), Some(slot as usize), "{slots}");
                oracle.set(slot as usize, false);
            }
            assert!(oracle.not_any(), "{slots}");
            // The last slot first.
            for slot in (0..slots).rev() {
                assert!(!map.is_free(slot));
                map.give(slot);
                assert_eq!(map.free(), slots - slot);
                assert_eq!(map.count(), map.free());
            }
            assert_eq!(map.take(), Some(0));
        }
    }
}

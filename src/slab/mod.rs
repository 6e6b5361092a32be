//! **Slab layer**: small requests — spans cut into equal slots, a bitmap for each.
//!
//! ```text
//! class 1 (512 B):  partial ─► slab at grain 12  |x|x| |x| … |   slab = a span of 64 KiB or more, a power of two
//!                              slab at grain 40  |x| | | | … |   slot = one block
//! ```
//!
//! A request takes the lowest free slot of the lowest slab that has one, so that slabs further up empty and go back.
//!
//! # Invariants, each in [`Slabs::check`]
//! - S1 `free slots + live slots == slots` in every slab, and the bitmap agrees with the live slots' records.
//! - S2 A slab is listed as partial exactly if it has a free slot. No slab is empty: the last free takes it away.
//!
//! # Concurrency
//! Guarded by the owner's lock.
//!
//! # Complexity
//! Take and give: O(log slabs of the class), and four words of bitmap at the most.

mod bitmap;
mod class;
#[cfg(feature = "testing")]
mod oracle;

pub(crate) use class::Class;
#[cfg(test)]
pub(crate) use class::MAX_SLOT_BYTES;
#[cfg(feature = "testing")]
pub(crate) use oracle::fuzz_slab;

use crate::arena::Table;
use crate::buddy::Run;
use bitmap::Bitmap;
use class::CLASSES;
use std::collections::BTreeSet;

/// What is known of a live slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Slot {
    /// The bytes asked for; 0 where the slot is free.
    pub(crate) requested: u32,
    /// Which allocation it is, to tell a stale owner.
    pub(crate) serial: u32,
}

/// A span cut into slots.
#[derive(Debug)]
pub(crate) struct Slab {
    pub(crate) class: Class,
    pub(crate) run: Run,
    free: Bitmap,
    slots: Box<[Slot]>,
}

impl Slab {
    /// The record of the block in a slot; `None` where the slot is free or there is no such slot.
    pub(crate) fn live(&self, slot: u32) -> Option<Slot> {
        let live = slot < self.class.slots() && !self.free.is_free(slot);
        live.then(|| self.slots[slot as usize])
    }
}

/// How many slabs and slots a class has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ClassUse {
    pub(crate) slabs: u64,
    pub(crate) live_slots: u64,
    pub(crate) requested_bytes: u64,
}

/// All slabs of a pool. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Slabs {
    slabs: Table<Slab>,
    /// By class: the slabs with a free slot, by first grain and index.
    partial: [BTreeSet<(u32, u32)>; CLASSES],
    uses: [ClassUse; CLASSES],
}

impl Slabs {
    pub(crate) fn new() -> Self {
        Self { slabs: Table::default(), partial: std::array::from_fn(|_| BTreeSet::new()), uses: [ClassUse::default(); CLASSES] }
    }

    pub(crate) fn get(&self, index: u32) -> Option<&Slab> {
        self.slabs.get(index)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Slab)> {
        self.slabs.iter()
    }

    pub(crate) fn class_use(&self, class: Class) -> ClassUse {
        self.uses[class.index()]
    }

    /// Makes a span a slab without a live slot. The caller takes a slot of it before anything else.
    pub(crate) fn adopt(&mut self, class: Class, run: Run) -> u32 {
        let slots = vec![Slot::default(); class.slots() as usize].into_boxed_slice();
        let index = self.slabs.insert(Slab { class, run, free: Bitmap::new(class.slots()), slots });
        self.partial[class.index()].insert((run.start, index));
        self.uses[class.index()].slabs += 1;
        index
    }

    /// Takes a slot of a class: its slab's index, the slab's first grain and the slot. `None` where every slab is full.
    pub(crate) fn take(&mut self, class: Class, record: Slot) -> Option<(u32, u32, u32)> {
        let &(grain, index) = self.partial[class.index()].first()?;
        let slab = self.slabs.get_mut(index).expect("S2: a partial slab is in the table");
        let slot = slab.free.take().expect("S2: a partial slab has a free slot");
        slab.slots[slot as usize] = record;
        if slab.free.free() == 0 {
            self.partial[class.index()].remove(&(grain, index));
        }
        let class_use = &mut self.uses[class.index()];
        class_use.live_slots += 1;
        class_use.requested_bytes += u64::from(record.requested);
        Some((index, grain, slot))
    }

    /// Gives a live slot back. Returns the slab's span where that was the last one: the slab is gone then.
    pub(crate) fn give(&mut self, index: u32, slot: u32) -> Option<Run> {
        let slab = self.slabs.get_mut(index).expect("the directory names slabs in the table");
        let (class, run) = (slab.class, slab.run);
        let class_use = &mut self.uses[class.index()];
        class_use.live_slots -= 1;
        class_use.requested_bytes -= u64::from(slab.slots[slot as usize].requested);
        slab.slots[slot as usize] = Slot::default();
        slab.free.give(slot);
        if slab.free.free() < class.slots() {
            self.partial[class.index()].insert((run.start, index));
            return None;
        }
        class_use.slabs -= 1;
        self.partial[class.index()].remove(&(run.start, index));
        self.slabs.remove(index);
        Some(run)
    }

    /// Notes that a live slot was asked for so many bytes, which fit in it.
    pub(crate) fn set_requested(&mut self, index: u32, slot: u32, requested: u32) {
        let slab = self.slabs.get_mut(index).expect("the directory names slabs in the table");
        let before = std::mem::replace(&mut slab.slots[slot as usize].requested, requested);
        let class_use = &mut self.uses[slab.class.index()];
        class_use.requested_bytes = class_use.requested_bytes - u64::from(before) + u64::from(requested);
    }

    /// Grains in all slabs.
    pub(crate) fn grains(&self) -> u64 {
        Class::all().map(|class| self.uses[class.index()].slabs * u64::from(class.slab_grains())).sum()
    }

    /// Checks S1 and S2.
    ///
    /// # Errors
    /// The first violation found.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut uses = [ClassUse::default(); CLASSES];
        for (index, slab) in self.slabs.iter() {
            let slots = slab.class.slots();
            let (free, counted) = (slab.free.free(), slab.free.count());
            let recorded = (0..slots).filter(|&slot| !slab.free.is_free(slot)).count() as u32;
            if free != counted || free + recorded != slots {
                return Err(format!("S1: slab {index} of {slots} slots has {free} free, {counted} bits set, {recorded} live"));
            }
            if recorded == 0 {
                return Err(format!("S2: slab {index} is empty"));
            }
            if self.partial[slab.class.index()].contains(&(slab.run.start, index)) != (free > 0) {
                return Err(format!("S2: slab {index} has {free} free slots and is listed otherwise"));
            }
            let class_use = &mut uses[slab.class.index()];
            class_use.slabs += 1;
            class_use.live_slots += u64::from(recorded);
            class_use.requested_bytes += slab.slots.iter().map(|slot| u64::from(slot.requested)).sum::<u64>();
        }
        if uses != self.uses {
            return Err("S1: a class's counts differ from its slabs".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every class: each slot of two slabs is handed out once, lowest first; a slab leaves with its last slot.
    #[test]
    fn slabs_fill_lowest_first_and_leave_when_empty() {
        for class in Class::all() {
            let mut slabs = Slabs::new();
            let record = |serial| Slot { requested: class.slot_bytes() as u32, serial };
            assert_eq!(slabs.take(class, record(0)), None);
            let high = slabs.adopt(class, Run { start: 1000, len: class.slab_grains() });
            assert_eq!(slabs.take(class, record(0)), Some((high, 1000, 0)));
            let low = slabs.adopt(class, Run { start: 10, len: class.slab_grains() });
            for slot in 0..class.slots() {
                assert_eq!(slabs.take(class, record(slot)), Some((low, 10, slot)));
                slabs.check().unwrap();
            }
            assert_eq!(slabs.take(class, record(1)), Some((high, 1000, 1)));
            assert_eq!(slabs.get(low).unwrap().live(class.slots() - 1), Some(record(class.slots() - 1)));
            assert_eq!(slabs.get(low).unwrap().live(class.slots()), None);
            assert_eq!(slabs.class_use(class).live_slots, u64::from(class.slots()) + 2);
            for slot in (1..class.slots()).rev() {
                assert_eq!(slabs.give(low, slot), None);
                assert_eq!(slabs.get(low).unwrap().live(slot), None);
                slabs.check().unwrap();
            }
            assert_eq!(slabs.give(low, 0), Some(Run { start: 10, len: class.slab_grains() }));
            assert!(slabs.get(low).is_none());
            slabs.check().unwrap();
            assert_eq!(slabs.grains(), u64::from(class.slab_grains()));
        }
    }
}

//! The slab layer against brute force: operations decoded from bytes, beside a `Vec<bool>` for each slab.

use super::{Class, ClassUse, Slabs, Slot};
use crate::buddy::Run;
use std::collections::HashSet;

/// How many operations a sequence has at the most.
const MAX_OPS: usize = 4096;
/// How many slabs there are at the most.
const MAX_SLABS: usize = 8;

/// Bytes in the slots of each class, spelt out.
const SLOT_BYTES: [u64; 28] = [
    256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 14336, 16384, 20480, 24576,
    28672, 32768, 40960, 49152, 57344, 65536,
];

/// What is known of a slab.
struct Known {
    index: u32,
    class: usize,
    run: Run,
    /// The record of each live slot.
    slots: Vec<Option<Slot>>,
}

impl Known {
    fn lowest_free(&self) -> Option<usize> {
        self.slots.iter().position(Option::is_none)
    }

    fn live(&self) -> usize {
        self.slots.iter().flatten().count()
    }
}

#[derive(Default)]
struct Model {
    slabs: Vec<Known>,
    /// Grains that are in a slab.
    grains: HashSet<u32>,
    serial: u32,
}

/// Runs the operations that bytes stand for: the body of the fuzz target `slab`.
///
/// # Panics
/// When something is violated.
pub(crate) fn fuzz_slab(data: &[u8]) {
    let mut bytes = data.iter().copied();
    let (mut slabs, mut model) = (Slabs::new(), Model::default());
    for _ in 0..MAX_OPS {
        let Some(code) = bytes.next() else { break };
        let mut field = || bytes.next().unwrap_or(0);
        match code % 4 {
            0 => {
                // One class for a whole run of requests, so that slabs fill.
                let (class, count, place) = (usize::from(field()) % 28, field(), field());
                for _ in 0..=count {
                    model.take(&mut slabs, class, SLOT_BYTES[class], u32::from(place));
                }
            }
            1 => {
                let size = u64::from(u16::from_le_bytes([field(), field()])) + u64::from(code / 128);
                let alignment = 1 << (field() % 16);
                if let Some(class) = class_of(size, alignment) {
                    model.take(&mut slabs, class, size, u32::from(code));
                }
            }
            2 => model.give(&mut slabs, field(), field()),
            _ => {
                let (which, count) = (field(), field());
                (0..=count).for_each(|slot| model.give(&mut slabs, which, slot.wrapping_mul(code | 1)));
            }
        }
        model.check(&slabs);
    }
    while !model.slabs.is_empty() {
        model.give(&mut slabs, 0, 0);
    }
    model.check(&slabs);
    assert_eq!((slabs.grains(), slabs.iter().count()), (0, 0));
}

/// The class for a request, by looking at each; that the layer says the same.
fn class_of(size: u64, alignment: u64) -> Option<usize> {
    let fits = |&slot: &u64| slot >= size && (alignment <= 256 || slot % alignment == 0) && alignment <= 16384;
    let class = SLOT_BYTES.iter().position(fits);
    assert_eq!(Class::of(size, alignment).map(Class::index), class, "{size} at {alignment}");
    class
}

impl Model {
    fn take(&mut self, slabs: &mut Slabs, class: usize, size: u64, place: u32) {
        let kind = Class::all().nth(class).expect("there are 28 classes");
        self.serial += 1;
        let record = Slot { requested: size as u32, serial: self.serial };
        let lowest =
            self.slabs.iter_mut().filter(|slab| slab.class == class && slab.lowest_free().is_some()).min_by_key(|slab| slab.run.start);
        let Some(slab) = lowest else {
            assert_eq!(slabs.take(kind, record), None, "no slab of class {class} has a free slot");
            if self.slabs.len() < MAX_SLABS {
                self.adopt(slabs, class, place);
                self.take(slabs, class, size, place);
            }
            return;
        };
        let slot = slab.lowest_free().expect("it has a free slot");
        assert_eq!(slabs.take(kind, record), Some((slab.index, slab.run.start, slot as u32)), "the lowest slot of the lowest slab");
        slab.slots[slot] = Some(record);
    }

    /// Makes grains from `place` on a slab: the first that are in none.
    fn adopt(&mut self, slabs: &mut Slabs, class: usize, place: u32) {
        let kind = Class::all().nth(class).expect("there are 28 classes");
        let bytes = (SLOT_BYTES[class] * 8).next_power_of_two().max(64 << 10);
        let len = (bytes / (16 << 10)) as u32;
        let start = (place..).find(|&start| (start..start + len).all(|grain| !self.grains.contains(&grain))).expect("grains do not end");
        let run = Run { start, len };
        self.grains.extend(start..start + len);
        let index = slabs.adopt(kind, run);
        assert!(self.slabs.iter().all(|slab| slab.index != index), "index {index} is another slab's");
        self.slabs.push(Known { index, class, run, slots: vec![None; (bytes / SLOT_BYTES[class]) as usize] });
    }

    /// Gives a live slot back: the first from `slot` on, round the slab.
    fn give(&mut self, slabs: &mut Slabs, which: u8, slot: u8) {
        if self.slabs.is_empty() {
            return;
        }
        let which = usize::from(which) % self.slabs.len();
        let slab = &mut self.slabs[which];
        let count = slab.slots.len();
        let slot = (0..count).map(|step| (usize::from(slot) + step) % count).find(|&slot| slab.slots[slot].is_some());
        let slot = slot.expect("no slab is empty");
        assert_eq!(slabs.get(slab.index).and_then(|found| found.live(slot as u32)), slab.slots[slot]);
        slab.slots[slot] = None;
        let left = slabs.give(slab.index, slot as u32);
        if slab.live() > 0 {
            assert_eq!(left, None);
            return;
        }
        assert_eq!(left, Some(slab.run), "the last slot takes the slab away");
        assert!(slabs.get(slab.index).is_none());
        (slab.run.start..slab.run.end()).for_each(|grain| assert!(self.grains.remove(&grain)));
        self.slabs.swap_remove(which);
    }

    fn check(&self, slabs: &Slabs) {
        slabs.check().expect("the layer's invariants hold");
        assert_eq!(slabs.iter().count(), self.slabs.len());
        assert_eq!(slabs.grains(), self.grains.len() as u64);
        let mut uses = [ClassUse::default(); 28];
        for known in &self.slabs {
            let slab = slabs.get(known.index).expect("the slab is there");
            assert_eq!((slab.class.index(), slab.run), (known.class, known.run));
            assert_eq!((slab.class.slot_bytes(), slab.class.slots() as usize), (SLOT_BYTES[known.class], known.slots.len()));
            for (slot, record) in known.slots.iter().enumerate() {
                assert_eq!(slab.live(slot as u32), *record, "slot {slot} of slab {}", known.index);
            }
            assert_eq!(slab.live(known.slots.len() as u32), None);
            let class_use = &mut uses[known.class];
            class_use.slabs += 1;
            class_use.live_slots += known.live() as u64;
            class_use.requested_bytes += known.slots.iter().flatten().map(|record| u64::from(record.requested)).sum::<u64>();
        }
        for class in Class::all() {
            assert_eq!(slabs.class_use(class), uses[class.index()]);
        }
    }
}

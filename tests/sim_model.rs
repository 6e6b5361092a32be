//! The simulated device against a naive model of virtual memory management: page by page, with linear searches alone.

use proptest::prelude::*;
use vrampool::driver::sim::{SimConfig, SimDriver};
use vrampool::driver::{AccessDescriptor, AccessFlags, Driver, DriverResult, HandleProperties, PhysicalHandle, StreamHandle};
use vrampool::error::CuResult;
use vrampool::units::{DeviceId, DevicePtr, KIB};

const DEVICE: DeviceId = DeviceId(0);
const UNIT: u64 = 64 * KIB;
const CAPACITY: u64 = 24;
const HANDLES: usize = 6;
const INVALID: CuResult = CuResult::ERROR_INVALID_VALUE;
const NO_MEMORY: CuResult = CuResult::ERROR_OUT_OF_MEMORY;

/// Picks are taken modulo what there is; places and lengths are in units.
#[derive(Clone, Copy, Debug)]
enum Op {
    Reserve { units: u64 },
    AddressFree { range: usize, cut: u64 },
    Create { units: u64 },
    Release { handle: usize },
    Map { range: usize, place: u64, handle: usize },
    Unmap { range: usize, place: u64, units: u64 },
    Access { range: usize, place: u64, units: u64 },
    Fill { range: usize, place: u64, units: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    let (pick, place, units) = (0..64usize, 0..9u64, 1..5u64);
    prop_oneof![
        1 => (1..9u64).prop_map(|units| Op::Reserve { units }),
        1 => (pick.clone(), 0..2u64).prop_map(|(range, cut)| Op::AddressFree { range, cut }),
        3 => (0..8u64).prop_map(|units| Op::Create { units }),
        2 => pick.clone().prop_map(|handle| Op::Release { handle }),
        8 => (pick.clone(), place.clone(), pick.clone()).prop_map(|(range, place, handle)| Op::Map { range, place, handle }),
        5 => (pick.clone(), place.clone(), units.clone()).prop_map(|(range, place, units)| Op::Unmap { range, place, units }),
        5 => (pick.clone(), place.clone(), units.clone()).prop_map(|(range, place, units)| Op::Access { range, place, units }),
        3 => (pick, place, units).prop_map(|(range, place, units)| Op::Fill { range, place, units }),
    ]
}

struct Memory {
    value: PhysicalHandle,
    units: u64,
    released: bool,
}

struct Mapping {
    start: u64,
    units: u64,
    memory: usize,
    access: bool,
}

impl Mapping {
    fn end(&self) -> u64 {
        self.start + self.units * UNIT
    }
}

#[derive(Default)]
struct Model {
    /// Start and units.
    ranges: Vec<(u64, u64)>,
    memories: Vec<Memory>,
    mappings: Vec<Mapping>,
}

impl Model {
    fn alive(&self, memory: usize) -> bool {
        !self.memories[memory].released || self.mappings.iter().any(|mapping| mapping.memory == memory)
    }

    fn held(&self) -> u64 {
        (0..self.memories.len()).filter(|&memory| self.alive(memory)).map(|memory| self.memories[memory].units).sum()
    }

    fn live(&self) -> Vec<usize> {
        (0..self.memories.len()).filter(|&memory| !self.memories[memory].released).collect()
    }

    fn mapping_over(&self, at: u64) -> Option<&Mapping> {
        self.mappings.iter().find(|mapping| mapping.start <= at && at < mapping.end())
    }

    /// Whether a range is made of whole mappings.
    fn is_whole(&self, start: u64, units: u64) -> bool {
        let end = start + units * UNIT;
        let uncut = |mapping: &Mapping| mapping.end() <= start || mapping.start >= end || (mapping.start >= start && mapping.end() <= end);
        (0..units).all(|unit| self.mapping_over(start + unit * UNIT).is_some()) && self.mappings.iter().all(uncut)
    }
}

fn run(ops: &[Op], backed: bool) -> Result<(), TestCaseError> {
    let config = SimConfig::default().capacity(CAPACITY * UNIT).granularity(UNIT).handle_limit(HANDLES as u64).backed(backed);
    let driver = SimDriver::new(config);
    let mut model = Model::default();
    let full = [AccessDescriptor { device: DEVICE, flags: AccessFlags::ReadWrite }];
    let mut peak = 0;
    for &op in ops {
        let range = |pick: usize| (!model.ranges.is_empty()).then(|| model.ranges[pick % model.ranges.len()]);
        let (expected, observed): (DriverResult<()>, DriverResult<()>) = match op {
            Op::Reserve { units } => {
                // The limit of a backed machine is 8 times its memory; the model does not go near it.
                if model.ranges.iter().map(|range| range.1).sum::<u64>() + units > 4 * CAPACITY {
                    continue;
                }
                let start = driver.mem_address_reserve(units * UNIT, 0);
                if let Ok(start) = start {
                    let start = start.address();
                    let disjoint = model.ranges.iter().all(|&(at, length)| at + length * UNIT <= start || start + units * UNIT <= at);
                    prop_assert!(disjoint && start % UNIT == 0);
                    model.ranges.push((start, units));
                }
                (Ok(()), start.map(drop))
            }
            Op::AddressFree { range: pick, cut } => {
                let Some((start, units)) = range(pick) else { continue };
                let empty = (0..units).all(|unit| model.mapping_over(start + unit * UNIT).is_none());
                let right = empty && cut == 0;
                if right {
                    model.ranges.retain(|range| range.0 != start);
                }
                let bytes = (units - cut.min(units)) * UNIT;
                (if right { Ok(()) } else { Err(INVALID) }, driver.mem_address_free(DevicePtr::new(start), bytes))
            }
            Op::Create { units } => {
                let count = (0..model.memories.len()).filter(|&memory| model.alive(memory)).count();
                let expected = match () {
                    () if units == 0 => Err(INVALID),
                    () if count == HANDLES || model.held() + units > CAPACITY => Err(NO_MEMORY),
                    () => Ok(()),
                };
                let handle = driver.mem_create(units * UNIT, &HandleProperties::on(DEVICE));
                if let Ok(value) = handle {
                    prop_assert!(model.live().iter().all(|&memory| model.memories[memory].value != value));
                    model.memories.push(Memory { value, units, released: false });
                }
                (expected, handle.map(drop))
            }
            Op::Release { handle } => {
                let live = model.live();
                if live.is_empty() {
                    continue;
                }
                let memory = &mut model.memories[live[handle % live.len()]];
                memory.released = true;
                (Ok(()), driver.mem_release(memory.value))
            }
            Op::Map { range: pick, place, handle } => {
                let live = model.live();
                let Some((start, _)) = range(pick).filter(|_| !live.is_empty()) else { continue };
                let memory = live[handle % live.len()];
                let Memory { value, units, .. } = model.memories[memory];
                let at = start + place * UNIT;
                // Ranges may touch, so a place past the end may lie in the next one.
                let home = model.ranges.iter().find(|&&(from, length)| from <= at && at < from + length * UNIT);
                let inside = home.is_some_and(|&(from, length)| at + units * UNIT <= from + length * UNIT);
                let vacant = (0..units).all(|unit| model.mapping_over(at + unit * UNIT).is_none());
                let expected = if inside && vacant { Ok(()) } else { Err(INVALID) };
                if expected.is_ok() {
                    model.mappings.push(Mapping { start: at, units, memory, access: false });
                }
                (expected, driver.mem_map(DevicePtr::new(at), units * UNIT, 0, value))
            }
            Op::Unmap { range: pick, place, units } => {
                let Some((start, _)) = range(pick) else { continue };
                let at = start + place * UNIT;
                let exact = model.mappings.iter().position(|mapping| mapping.start == at && mapping.units == units);
                if let Some(index) = exact {
                    model.mappings.remove(index);
                }
                (exact.map(drop).ok_or(INVALID), driver.mem_unmap(DevicePtr::new(at), units * UNIT))
            }
            Op::Access { range: pick, place, units } => {
                let Some((start, _)) = range(pick) else { continue };
                let at = start + place * UNIT;
                let whole = model.is_whole(at, units);
                if whole {
                    let inside = |mapping: &&mut Mapping| mapping.start >= at && mapping.end() <= at + units * UNIT;
                    model.mappings.iter_mut().filter(inside).for_each(|mapping| mapping.access = true);
                }
                (if whole { Ok(()) } else { Err(INVALID) }, driver.mem_set_access(DevicePtr::new(at), units * UNIT, &full))
            }
            Op::Fill { range: pick, place, units } => {
                let Some((start, _)) = range(pick) else { continue };
                let at = start + place * UNIT;
                let allowed = (0..units).all(|unit| model.mapping_over(at + unit * UNIT).is_some_and(|mapping| mapping.access));
                let fill = driver.memset_d8_async(DEVICE, DevicePtr::new(at), 1, units * UNIT, StreamHandle::LEGACY);
                (if allowed { Ok(()) } else { Err(INVALID) }, fill)
            }
        };
        prop_assert_eq!(expected, observed, "{:?}", op);
        peak = peak.max(model.held());
        prop_assert_eq!(driver.held_bytes(DEVICE), model.held() * UNIT);
        prop_assert_eq!(driver.peak_bytes(DEVICE), peak * UNIT);
        prop_assert_eq!(driver.live_mappings(), model.mappings.len());
        prop_assert_eq!(driver.live_handles(), model.live().len());
        prop_assert_eq!(driver.reserved_address_bytes(), model.ranges.iter().map(|range| range.1 * UNIT).sum::<u64>());
    }
    for mapping in &model.mappings {
        driver.mem_unmap(DevicePtr::new(mapping.start), mapping.units * UNIT).unwrap();
    }
    for memory in model.live() {
        driver.mem_release(model.memories[memory].value).unwrap();
    }
    for &(start, units) in &model.ranges {
        driver.mem_address_free(DevicePtr::new(start), units * UNIT).unwrap();
    }
    prop_assert_eq!(driver.audit(), Ok(()));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn addresses_alone(ops in prop::collection::vec(op(), 1..120)) {
        run(&ops, false)?;
    }

    #[test]
    fn backed(ops in prop::collection::vec(op(), 1..120)) {
        run(&ops, true)?;
    }
}

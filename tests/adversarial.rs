//! The most that a pool may hold, computed beside it from nothing but sizes, addresses and the device's own counts.

use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use vrampool::driver::Driver;
use vrampool::driver::sim::{SimConfig, SimDriver};
use vrampool::units::DeviceId;
use vrampool::{Device, DeviceBuffer, Pool};

const DEVICE: DeviceId = DeviceId(0);
const GRAIN: u64 = 16 << 10;
const PAGE: u64 = 2 << 20;

/// The sizes of slots, by the documentation: 256 to 1024 bytes, then four for each doubling.
fn slot_bytes(size: u64) -> u64 {
    let step = if size <= 1024 { 256 } else { (size.next_power_of_two() / 8).max(256) };
    size.next_multiple_of(step)
}

/// A slab has eight slots or more, and is a power of two of at least 64 KiB.
fn slab_bytes(slot: u64) -> u64 {
    (8 * slot).next_power_of_two().max(64 << 10)
}

/// The grains that live blocks keep in use: their own, or their slab's.
#[derive(Default)]
struct Shadow {
    /// By the first byte: the bytes in use from there on, and how many blocks keep them so.
    spans: BTreeMap<u64, (u64, u32)>,
}

impl Shadow {
    /// Notes a block, and says where its span begins.
    fn note(&mut self, address: u64, size: u64) -> u64 {
        if size > 64 << 10 {
            self.spans.insert(address, (size.next_multiple_of(GRAIN), 1));
            return address;
        }
        let slot = slot_bytes(size);
        let within = self.spans.range_mut(..=address).next_back().filter(|(start, (bytes, _))| address < *start + bytes);
        if let Some((&start, (_, count))) = within {
            *count += 1;
            return start;
        }
        // The first block of a slab has its first slot.
        self.spans.insert(address, (slab_bytes(slot), 1));
        address
    }

    fn forget(&mut self, start: u64) {
        let span = self.spans.get_mut(&start).expect("the span was noted");
        span.1 -= 1;
        if span.1 == 0 {
            self.spans.remove(&start);
        }
    }

    /// Bytes of all spans.
    fn rounded(&self) -> u64 {
        self.spans.values().map(|(bytes, _)| bytes).sum()
    }

    /// Pages that a span lies in.
    fn pages(&self) -> u64 {
        let pages = self.spans.iter().flat_map(|(start, (bytes, _))| start / PAGE..(start + bytes).div_ceil(PAGE));
        pages.collect::<BTreeSet<_>>().len() as u64
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Allocate(u64),
    Free(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let pages = (1..12u64).prop_map(|halves| halves * PAGE / 2);
    let grains = (5..400u64).prop_map(|grains| grains * GRAIN);
    let slots = (1..=64u64 << 10).prop_map(|size| size);
    prop_oneof![
        3 => pages.prop_map(Op::Allocate),
        3 => grains.prop_map(Op::Allocate),
        1 => slots.prop_map(Op::Allocate),
        5 => any::<usize>().prop_map(Op::Free),
    ]
}

/// A pool over a simulated device, beside its shadow.
struct Bench {
    sim: Arc<SimDriver>,
    pool: Pool,
    shadow: Shadow,
    buffers: Vec<(DeviceBuffer, u64)>,
}

impl Bench {
    fn new(memory: u64, configure: impl FnOnce(vrampool::PoolBuilder) -> vrampool::PoolBuilder) -> Self {
        let sim = SimDriver::new(SimConfig::default().capacity(memory));
        let device = Device::new(Arc::clone(&sim) as Arc<dyn Driver>, DEVICE).expect("the device is there");
        let pool = configure(Pool::builder().device(device)).build().expect("nothing is asked for yet");
        Self { sim, pool, shadow: Shadow::default(), buffers: Vec::new() }
    }

    fn note(&mut self, buffer: DeviceBuffer, size: u64) {
        let span = self.shadow.note(buffer.address().address(), size);
        self.buffers.push((buffer, span));
    }

    fn free(&mut self, which: usize) {
        if let Some(which) = which.checked_rem(self.buffers.len()) {
            let (buffer, span) = self.buffers.swap_remove(which);
            self.shadow.forget(span);
            buffer.free().expect("the block is live");
        }
    }
}

/// At a maximum of pages, a request may only fail where the pages with live memory and its own are more.
fn fails_only_when_full(ops: &[Op], maximum: u64) -> Result<(), TestCaseError> {
    let mut bench = Bench::new(64 * PAGE, |builder| builder.maximum(maximum * PAGE));
    for (at, &op) in ops.iter().enumerate() {
        match op {
            Op::Free(which) => bench.free(which),
            Op::Allocate(size) => match bench.pool.allocate_buffer(size) {
                // At the end of its memory a pool serves a small request without a slab.
                Ok(buffer) if size <= 64 << 10 && bench.shadow.pages() >= maximum => buffer.free().expect("the block is live"),
                Ok(buffer) => bench.note(buffer, size),
                Err(error) => {
                    let live = bench.shadow.pages();
                    prop_assert!(live + size.div_ceil(PAGE) > maximum, "operation {at}, {size} bytes beside {live} pages: {error}");
                }
            },
        }
        prop_assert!(bench.sim.peak_bytes(DEVICE) <= maximum * PAGE);
    }
    Ok(())
}

/// Without a maximum, a pool holds no more than its budget allows, or than the pages with live memory in them.
fn stays_within(ops: &[Op], slack: f64) -> Result<(), TestCaseError> {
    let mut bench = Bench::new(1 << 40, |builder| builder.configure(&format!("slack={slack}")).expect("the option is known"));
    let (mut peak, mut moved, mut bound) = (0u64, 0u64, 0u64);
    for (at, &op) in ops.iter().enumerate() {
        match op {
            Op::Free(which) => bench.free(which),
            Op::Allocate(size) => {
                let unmapped = bench.sim.calls(vrampool::driver::Call::MemUnmap);
                let buffer = bench.pool.allocate_buffer(size).expect("there is memory enough");
                bench.note(buffer, size);
                // No handle is larger than a page here, and nothing is unmapped but what is moved.
                moved += bench.sim.calls(vrampool::driver::Call::MemUnmap) - unmapped;
                peak = peak.max(bench.shadow.rounded());
                let budget = (1.0 + slack + moved as f64 / 5000.0) * peak as f64;
                bound = bound.max(budget as u64).max(bench.shadow.pages() * PAGE);
            }
        }
        let held = bench.sim.held_bytes(DEVICE);
        prop_assert!(
            held <= bound,
            "operation {at}: {held} bytes are held, {} pages are in use; peak {peak}, {moved} moves: at most {bound}",
            bench.shadow.pages()
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn a_request_fails_only_when_the_pages_are_full(ops in prop::collection::vec(op(), 1..80), maximum in 1..24u64) {
        fails_only_when_full(&ops, maximum)?;
    }

    #[test]
    fn what_is_held_stays_within_the_bound(ops in prop::collection::vec(op(), 1..80), slack in prop::sample::select(vec![0.0, 0.02, 0.25])) {
        stays_within(&ops, slack)?;
    }
}

/// Once, all of a request was taken anew where the idle pages were fewer than its need, and these stayed idle.
#[test]
fn idle_pages_are_used_although_they_are_too_few() {
    let (half, page) = (PAGE / 2, PAGE);
    let allocate = [half, half, half].map(Op::Allocate);
    let mut ops = [&allocate[..], &[Op::Free(0); 3]].concat();
    ops.extend([page, page, 5 * GRAIN].map(Op::Allocate));
    ops.push(Op::Free(0));
    ops.extend([2 * page, half].map(Op::Allocate));
    stays_within(&ops, 0.0).unwrap();
}

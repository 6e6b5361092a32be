//! Simulated machines that give memory in every way there is, and what must hold of a pool at any quiet moment.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use vrampool::driver::sim::{FaultTarget, PlainPlacement, SimConfig, SimDriver};
use vrampool::driver::{Call, Driver, MemoryKind};
use vrampool::units::{DeviceId, GIB, KIB, MIB};
use vrampool::{Device, DevicePtr, Pool, PoolBuilder, Result, Statistics};

pub(crate) const DEVICE: DeviceId = DeviceId(0);

/// How memory comes to a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// Pages are mapped, at this granularity.
    Mapped(u64),
    /// Plain allocations of a kind, placed so, on a device without virtual memory management.
    Plain(MemoryKind, PlainPlacement),
}

use MemoryKind::{Device as OnDevice, Managed, Pinned};
use PlainPlacement::{Adjacent, Odd};

/// Every granularity.
pub(crate) const MAPPED: [Source; 3] = [Source::Mapped(64 * KIB), Source::Mapped(2 * MIB), Source::Mapped(32 * MIB)];

/// Every way there is.
pub(crate) const SOURCES: [Source; 12] = [
    MAPPED[0],
    MAPPED[1],
    MAPPED[2],
    Source::Plain(OnDevice, PlainPlacement::Driver),
    Source::Plain(OnDevice, Adjacent),
    Source::Plain(OnDevice, Odd),
    Source::Plain(Pinned, PlainPlacement::Driver),
    Source::Plain(Pinned, Adjacent),
    Source::Plain(Pinned, Odd),
    Source::Plain(Managed, PlainPlacement::Driver),
    Source::Plain(Managed, Adjacent),
    Source::Plain(Managed, Odd),
];

impl Source {
    pub(crate) fn maps_pages(self) -> bool {
        matches!(self, Self::Mapped(_))
    }

    /// Whether the driver's addresses are such that a plain allocation has to be larger than what it is for.
    pub(crate) fn pads(self) -> bool {
        matches!(self, Self::Plain(_, Adjacent | Odd))
    }

    pub(crate) fn page_bytes(self) -> u64 {
        match self {
            Self::Mapped(granularity) => granularity.max(2 * MIB),
            Self::Plain(..) => 2 * MIB,
        }
    }

    fn kind(self) -> MemoryKind {
        match self {
            Self::Mapped(_) => OnDevice,
            Self::Plain(kind, _) => kind,
        }
    }
}

/// A simulated machine with one device.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) sim: Arc<SimDriver>,
    pub(crate) source: Source,
}

impl Machine {
    /// A machine with `bytes` bytes of the memory that `source` is about.
    pub(crate) fn new(source: Source, bytes: u64) -> Self {
        Self::with(source, bytes, |config| config)
    }

    pub(crate) fn with(source: Source, bytes: u64, change: impl FnOnce(SimConfig) -> SimConfig) -> Self {
        let mut config = SimConfig::default();
        config = match source {
            Source::Mapped(granularity) => config.granularity(granularity),
            Source::Plain(_, placement) => config.virtual_memory_management(false).placement(placement),
        };
        if source.kind() == OnDevice {
            config = config.capacity(bytes);
        } else {
            config.host_bytes = bytes;
        }
        Self { sim: SimDriver::new(change(config)), source }
    }

    /// A machine with more memory than any of these tests uses.
    pub(crate) fn large(source: Source) -> Self {
        Self::new(source, 64 * GIB)
    }

    pub(crate) fn device(&self) -> Device {
        Device::new(Arc::clone(&self.sim) as Arc<dyn Driver>, DEVICE).unwrap()
    }

    pub(crate) fn builder(&self) -> PoolBuilder {
        self.builder_on(self.device())
    }

    /// A builder for the source's kind of memory, on a device of this machine.
    pub(crate) fn builder_on(&self, device: Device) -> PoolBuilder {
        Pool::builder().device(device).kind(self.source.kind())
    }

    pub(crate) fn pool(&self) -> Pool {
        self.builder().build().unwrap()
    }

    /// The bytes held from the driver by its own count.
    pub(crate) fn held(&self) -> u64 {
        if self.source.kind() == OnDevice { self.sim.held_bytes(DEVICE) } else { self.sim.host_bytes() }
    }

    /// How many calls there were that take, give back or map memory.
    pub(crate) fn memory_calls(&self) -> u64 {
        self.sim.calls(FaultTarget::MemoryCalls)
    }

    /// How many times memory was asked for.
    pub(crate) fn takings(&self) -> u64 {
        [Call::MemCreate, Call::MemAlloc, Call::MemAllocHost, Call::MemAllocManaged].iter().map(|&call| self.sim.calls(call)).sum()
    }

    /// How many plain allocations and mappings there are.
    pub(crate) fn pieces(&self) -> usize {
        self.sim.live_mappings() + self.sim.live_allocations()
    }

    /// Whether every byte of a block is one piece of memory that the device may write.
    pub(crate) fn is_usable(&self, address: DevicePtr, bytes: u64) -> bool {
        self.sim.is_writable(DEVICE, address, bytes)
    }

    /// Checks every invariant of the pool, and its count against the driver's.
    #[track_caller]
    pub(crate) fn check(&self, pool: &Pool) -> Statistics {
        pool.check().unwrap_or_else(|error| panic!("{:?}: {error}", self.source));
        let statistics = pool.statistics();
        assert_eq!(statistics.reserved_bytes, self.held(), "{:?}: {statistics:?}", self.source);
        statistics
    }

    /// Drops the pool's last handle; nothing may be outstanding then.
    #[track_caller]
    pub(crate) fn finish(&self, pool: Pool) {
        self.check(&pool);
        drop(pool);
        self.sim.audit().unwrap_or_else(|error| panic!("{:?}: {error}", self.source));
    }
}

/// Frees a block by its address.
#[allow(unsafe_code)]
pub(crate) fn free(pool: &Pool, address: DevicePtr) -> Result<()> {
    // SAFETY: no test queues work on a block, or uses a buffer after its block was freed by the address.
    unsafe { pool.deallocate(address) }
}

/// Statistics of which only the count of failed allocations may differ from `before`.
#[track_caller]
pub(crate) fn assert_only_failures(before: &Statistics, after: &Statistics, failures: u64) {
    let mut expected = before.clone();
    expected.failed_allocations += failures;
    assert_eq!(&expected, after);
}

/// Who owns which addresses, over all threads.
#[derive(Debug, Default)]
pub(crate) struct Owners(Mutex<BTreeMap<u64, u64>>);

impl Owners {
    fn ranges(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a new block, which must overlap no other.
    #[track_caller]
    pub(crate) fn take(&self, address: DevicePtr, bytes: u64) {
        let (start, end) = (address.address(), address.address() + bytes);
        let mut ranges = self.ranges();
        if let Some((&other, &other_end)) = ranges.range(..end).next_back() {
            assert!(other_end <= start, "{start:#x}..{end:#x} overlaps {other:#x}..{other_end:#x}");
        }
        ranges.insert(start, end);
    }

    /// Forgets a block, just before it is freed.
    #[track_caller]
    pub(crate) fn give(&self, address: DevicePtr) {
        assert!(self.ranges().remove(&address.address()).is_some(), "{address} is nobody's");
    }
}

/// Draws numbers: splitmix64.
#[derive(Clone, Debug)]
pub(crate) struct Draw(pub(crate) u64);

impl Draw {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A size of 2^0, 2^1, … or 2^(`orders` - 1) bytes at the most, each as likely.
    pub(crate) fn size(&mut self, orders: u64) -> u64 {
        let top = 1 << self.below(orders);
        self.between(1, top)
    }

    /// A number from `low` to `high`.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }
}

/// Every order of `count` things.
pub(crate) fn permutations(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let shorter = permutations(count - 1);
    let insert = |order: &Vec<usize>, at: usize| [&order[..at], &[count - 1], &order[at..]].concat();
    shorter.iter().flat_map(|order| (0..count).map(move |at| insert(order, at))).collect()
}

//! The runner that property tests and fuzz targets share: a sequence of operations on a pool over the simulated device,
//! beside a shadow allocator that knows what must be true.
//!
//! After every operation the invariants of every layer hold ([`Pool::check`](crate::Pool::check)), the pool's count of
//! memory is the simulated device's, and no more than the maximum was ever held. No block overlaps another, every
//! address is aligned, and a request that must succeed does. At the end everything is freed, one allocation of the whole
//! memory must succeed, and the device's audit must find nothing outstanding.
//!
//! Not a stable interface.

mod codec;
mod hold;
mod shadow;

pub use codec::{decode, encode};

use crate::driver::sim::{FaultTarget, Piece, PlainPlacement, SimConfig, SimDriver};
use crate::driver::{Call, Device, Driver};
use crate::error::{CuResult, Error};
use crate::pool::{MemoryLimit, Pool, Reservation, Statistics};
use crate::sync::{Arc, Mutex};
use crate::units::{DeviceId, DevicePtr, MIB};
use shadow::{Held, Shadow};

/// The device and the pool that a sequence runs on. Every value stands for something valid, whatever it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Setup {
    /// 0: 2 MiB, 1: 64 KiB, 2: 32 MiB; 3: no virtual memory management.
    pub device: u8,
    /// Pages in the device's memory, from 1 to 64.
    pub memory_pages: u8,
    /// Pages that the pool may hold; 0 for no maximum.
    pub maximum_pages: u8,
    /// Pages to begin with.
    pub initial_pages: u8,
    /// Pages to grow by.
    pub growth_pages: u8,
    /// Where plain allocations lie: 0 as the driver places them, 1 adjacent, 2 at odd addresses. Beyond these, a third of it
    /// says how much slack the pool has and what it aligns to.
    pub placement: u8,
}

/// A size in floating form, so that small and large ones are as likely: 2^exponent and a fraction of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Size {
    /// The power of two, from 0 to 28.
    pub exponent: u8,
    /// What is added, in 65,536ths of the power.
    pub fraction: u16,
}

impl Size {
    /// The size in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        let power = 1u64 << (self.exponent % 29);
        power + ((power * u64::from(self.fraction)) >> 16)
    }
}

/// One operation. `which` numbers a live block, modulo how many there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Allocate, as a [`DeviceBuffer`](crate::DeviceBuffer) or as an address.
    Allocate {
        /// How much.
        size: Size,
        /// The alignment's power of two, from 0 to 30.
        alignment: u8,
        /// Whether as a buffer.
        buffer: bool,
        /// Whether on one handle.
        contiguous: bool,
    },
    /// Free a block; a buffer is dropped.
    Free {
        /// Which.
        which: u16,
    },
    /// Free a buffer's block by its address, and drop the buffer at the end of the sequence.
    FreeUnderBuffer {
        /// Which.
        which: u16,
    },
    /// Free an address that is not the start of a live block: so far into or behind a block, or a dead block.
    FreeInvalid {
        /// Which block.
        which: u16,
        /// How far from its start.
        offset: u16,
    },
    /// Set memory aside.
    Reserve {
        /// How much.
        size: Size,
    },
    /// Draw a block from a reservation, as a buffer or as an address.
    Draw {
        /// From which, modulo how many there are.
        which: u8,
        /// How much.
        size: Size,
        /// The alignment's power of two, from 0 to 30.
        alignment: u8,
        /// Whether as a buffer.
        buffer: bool,
    },
    /// Drop a reservation.
    EndReservation {
        /// Which, modulo how many there are.
        which: u8,
    },
    /// Make a block longer in place.
    Grow {
        /// Which.
        which: u16,
        /// To how much.
        size: Size,
    },
    /// Trim to so many pages.
    Trim {
        /// How many.
        pages: u8,
    },
    /// Set the maximum of the pool, or of the limit that it shares.
    SetMaximum {
        /// To how many pages; 0 for none.
        pages: u8,
        /// Whether that of the limit.
        shared: bool,
    },
    /// Free every block: from the lowest up, from the highest down, or every other first.
    FreeAll {
        /// In which order.
        order: u8,
    },
    /// Have a driver call fail.
    Fail {
        /// 0: the next of any that manages memory; otherwise one of the kinds.
        call: u8,
        /// How many of them succeed first.
        after: u8,
        /// Whether with another code than a lack of memory.
        fatal: bool,
    },
    /// In the middle of a later driver call, free a block or trim, as another thread might.
    Amid {
        /// How many memory-managing calls come first.
        after: u8,
        /// Which block to free.
        which: u16,
        /// Whether to trim to nothing instead.
        trim: bool,
    },
}

/// What happens in the middle of driver calls.
#[derive(Debug, Default)]
struct Amid {
    plans: Vec<(u8, u16, bool)>,
    pool: Option<Pool>,
}

/// A maximum.
#[derive(Clone, Copy, Debug, Default)]
struct Bound {
    maximum: Option<u64>,
    /// What was held when it was set, as far as it has not gone since.
    ceiling: u64,
}

struct Runner {
    sim: Arc<SimDriver>,
    pool: Pool,
    shadow: Arc<Mutex<Shadow>>,
    reservations: Vec<Reservation>,
    amid: Arc<Mutex<Amid>>,
    /// The most that can be held, in bytes: the maximum or the device's memory.
    limit: u64,
    /// The device's memory, in bytes.
    memory: u64,
    /// The pool's own maximum, and that of the limit that it shares with nobody.
    bounds: [Bound; 2],
    shared_limit: MemoryLimit,
    maps_pages: bool,
    /// What plain allocations lose to their addresses.
    padding: u64,
    faults_planned: usize,
    /// Whether a fault was planned that may meet a call which gives something back.
    undoing_may_fail: bool,
    /// How many faults had come about when nothing was unsettled the last time.
    settled_at: usize,
}

const DEVICE: DeviceId = DeviceId(0);

/// Runs a sequence.
///
/// # Errors
/// What was violated, and after which operation.
pub fn run(setup: Setup, ops: &[Op]) -> Result<(), String> {
    let Some(mut runner) = Runner::new(setup)? else { return Ok(()) };
    for (index, op) in ops.iter().enumerate() {
        runner.step(op).and_then(|()| runner.check()).map_err(|error| format!("operation {index}, {op:?}: {error}"))?;
    }
    runner.finish()
}

/// Decodes a sequence from bytes, whatever they are, and runs it: the body of the fuzz target `pool`.
///
/// # Panics
/// When something is violated.
pub fn fuzz_pool(data: &[u8]) {
    let (setup, ops) = decode(data);
    if let Err(error) = run(setup, &ops) {
        panic!("{error}\nsetup: {setup:?}\noperations: {ops:#?}");
    }
}

/// Runs the buddy layer on operations decoded from bytes, beside an oracle: the body of the fuzz target `buddy`.
///
/// # Panics
/// When something is violated.
pub fn fuzz_buddy(data: &[u8]) {
    crate::buddy::fuzz_buddy(data);
}

/// Runs the slab layer on operations decoded from bytes, beside an oracle: the body of the fuzz target `slab`.
///
/// # Panics
/// When something is violated.
pub fn fuzz_slab(data: &[u8]) {
    crate::slab::fuzz_slab(data);
}

impl Runner {
    /// Builds device and pool; `None` where the initial size is rightly refused.
    fn new(setup: Setup) -> Result<Option<Self>, String> {
        let maps_pages = setup.device % 4 != 3;
        let granularity = [2 * MIB, 64 << 10, 32 * MIB, 2 * MIB][usize::from(setup.device % 4)];
        let page = granularity.max(2 * MIB);
        let memory = u64::from(setup.memory_pages % 64 + 1) * page;
        let placement = [PlainPlacement::Driver, PlainPlacement::Adjacent, PlainPlacement::Odd][usize::from(setup.placement % 3)];
        let odd = !maps_pages && placement == PlainPlacement::Odd;
        let config =
            SimConfig::default().capacity(memory).granularity(granularity).virtual_memory_management(maps_pages).placement(placement);
        let sim = SimDriver::new(config);
        let maximum = (setup.maximum_pages > 0).then(|| u64::from(setup.maximum_pages) * page);
        let limit = memory.min(maximum.unwrap_or(memory));
        let initial = u64::from(setup.initial_pages) * page;
        let device = Device::new(Arc::clone(&sim) as Arc<dyn Driver>, DEVICE).map_err(|error| error.to_string())?;
        let shared_limit = MemoryLimit::new(u64::MAX);
        let bounds = [Bound { maximum, ceiling: 0 }, Bound::default()];
        let slack = [0.02, 0.0, 0.25, 1.0][usize::from(setup.placement / 3 % 4)];
        let alignment = 256 << (setup.placement / 12 % 2);
        let mut builder = Pool::builder().initial(initial).growth(u64::from(setup.growth_pages) * page).slack(slack).alignment(alignment);
        if let Some(maximum) = maximum {
            // Off the page, so that rounding down is put to the test.
            builder = builder.maximum(maximum + page / 3);
        }
        // What a builder is told and what its text tells another come to the same.
        let text = builder.config();
        let builder = Pool::builder().configure(&text).map_err(|error| error.to_string())?;
        let pool = match builder.device(device).limit(&shared_limit).build() {
            Ok(pool) if pool.config() != text => return Err(format!("a pool of '{text}' says that it is '{}'", pool.config())),
            Ok(pool) => pool,
            Err(error) if initial > limit || (odd && initial + page > limit) => {
                if !(error.is_invalid_argument() || error.is_out_of_memory()) {
                    return Err(format!("building failed with {error}"));
                }
                return sim.audit().map(|()| None);
            }
            Err(error) => return Err(format!("an initial size of {initial} of {limit} failed: {error}")),
        };
        let shadow = Arc::new(Mutex::new(Shadow::default()));
        let amid = Arc::new(Mutex::new(Amid { plans: Vec::new(), pool: Some(pool.clone()) }));
        let hook = (Arc::clone(&shadow), Arc::clone(&amid));
        sim.set_hook(move |call| meanwhile(call, &hook.0, &hook.1));
        let padding = if odd { page } else { 0 };
        let reservations = Vec::new();
        Ok(Some(Self {
            sim,
            pool,
            shadow,
            reservations,
            amid,
            limit,
            memory,
            bounds,
            shared_limit,
            maps_pages,
            padding,
            faults_planned: 0,
            undoing_may_fail: false,
            settled_at: 0,
        }))
    }

    fn step(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::Allocate { size, alignment, buffer, contiguous } => self.allocate(size.bytes(), 1 << (alignment % 31), buffer, contiguous),
            Op::Free { which } => match self.take(which) {
                Some((address, Held::Raw)) => self.pool.free(address).map_err(|error| error.to_string()),
                Some((_, Held::Buffer(buffer))) => buffer.free().map_err(|error| error.to_string()),
                None => Ok(()),
            },
            Op::FreeUnderBuffer { which } => {
                let Some((address, held)) = self.take(which) else { return Ok(()) };
                self.pool.free(address).map_err(|error| error.to_string())?;
                if let Held::Buffer(buffer) = held {
                    let refused = buffer.free().err().ok_or("a buffer freed a block that was not its own any more")?;
                    if refused.error().invalid_free_reason().is_none() {
                        return Err(format!("a stale buffer: {refused}"));
                    }
                    // Handed back as it was; dropped at the end.
                    self.shadow.lock().stale.push(refused.into_buffer());
                }
                Ok(())
            }
            Op::FreeInvalid { which, offset } => self.free_invalid(which, u64::from(offset)),
            Op::Reserve { size } => self.reserve(size.bytes()),
            Op::Draw { which, size, alignment, buffer } => self.draw(which, size.bytes(), 1 << (alignment % 31), buffer),
            Op::EndReservation { which } => self.end_reservation(which),
            Op::Grow { which, size } => self.grow(which, size.bytes()),
            Op::Trim { pages } => {
                let to = u64::from(pages) * self.pool.page_bytes();
                let faults = self.faults_done();
                match self.pool.trim(to) {
                    Ok(held) if held == self.sim.held_bytes(DEVICE) => Ok(()),
                    Ok(held) => Err(format!("trim says {held} bytes, the device {}", self.sim.held_bytes(DEVICE))),
                    Err(error) if error.is_driver() && faults < self.faults_done() => Ok(()),
                    Err(error) => Err(format!("trim failed without a cause: {error}")),
                }
            }
            Op::SetMaximum { pages, shared } => self.set_maximum(pages, shared),
            Op::FreeAll { order } => self.free_all(order),
            Op::Fail { call, after, fatal } => {
                let kinds =
                    [Call::MemCreate, Call::MemMap, Call::MemSetAccess, Call::MemUnmap, Call::MemRelease, Call::MemAlloc, Call::MemFree];
                self.faults_planned += 1;
                self.undoing_may_fail |= !(1..=3).contains(&call);
                let code = if fatal { CuResult::ERROR_UNKNOWN } else { CuResult::ERROR_OUT_OF_MEMORY };
                match usize::from(call).checked_sub(1) {
                    Some(kind) => self.sim.fail(kinds[kind % kinds.len()], u64::from(after), code),
                    None => self.sim.fail(FaultTarget::MemoryCalls, u64::from(after), code),
                }
                Ok(())
            }
            Op::Amid { after, which, trim } => {
                self.amid.lock().plans.push((after, which, trim));
                Ok(())
            }
        }
    }

    /// How many planned faults have come about.
    fn faults_done(&self) -> usize {
        self.faults_planned - self.sim.faults_planned()
    }

    fn take(&self, which: u16) -> Option<(DevicePtr, Held)> {
        self.shadow.lock().take(which)
    }

    fn allocate(&mut self, size: u64, alignment: u64, buffer: bool, contiguous: bool) -> Result<(), String> {
        let before = self.pool.statistics();
        let faults = self.faults_done();
        let pool = &self.pool;
        let result = if buffer {
            let buffer =
                if contiguous { pool.allocate_buffer_contiguous(size, alignment) } else { pool.allocate_buffer_aligned(size, alignment) };
            buffer.map(|buffer| (buffer.address(), Held::Buffer(buffer)))
        } else {
            let address = if contiguous { pool.allocate_contiguous(size, alignment) } else { pool.allocate_aligned(size, alignment) };
            address.map(|address| (address, Held::Raw))
        };
        match result {
            Ok((address, held)) => {
                if !address.is_aligned_to(alignment.max(256)) {
                    return Err(format!("{address} is not a multiple of {alignment}"));
                }
                if self.maps_pages && !self.sim.is_writable(DEVICE, address, size) {
                    return Err(format!("{size} bytes at {address} are not all mapped with access"));
                }
                let in_piece = |piece: Piece| address.address() + size <= piece.address.address() + piece.bytes;
                if contiguous && !self.sim.piece_at(address).is_some_and(in_piece) {
                    return Err(format!("{size} bytes at {address} are not on one handle"));
                }
                if let Held::Buffer(buffer) = &held
                    && (buffer.size(), buffer.pool().device()) != (size, DEVICE)
                {
                    return Err(format!("a buffer of {size} bytes is {buffer:?}"));
                }
                self.shadow.lock().insert(address, size, held)
            }
            Err(error) => self.judge(&error, size, alignment, &before, faults),
        }
    }

    /// Whether new memory of a size may be refused so: for a fault that came about since there were `faults`, or for lack of
    /// memory.
    fn judge(&self, error: &Error, size: u64, alignment: u64, before: &Statistics, faults: usize) -> Result<(), String> {
        if faults < self.faults_done() {
            let known = error.is_out_of_memory() || error.is_driver();
            return if known { Ok(()) } else { Err(format!("a fault of the driver came out as {error}")) };
        }
        let numbers = error.numbers().ok_or_else(|| format!("{size} bytes at {alignment}: {error}"))?;
        // A plain allocation is aligned by asking for more.
        let slack = if self.maps_pages || alignment <= 16 << 10 { 0 } else { alignment };
        let needed = (size + slack).next_multiple_of(self.pool.page_bytes()) + self.padding;
        let fits = needed <= self.limit.saturating_sub(before.reserved_bytes);
        let empty = before.live_blocks == 0 && before.committed_bytes == 0 && needed <= self.limit;
        if fits || empty {
            return Err(format!("{size} bytes at {alignment} must fit: {error}; before: {before:?}"));
        }
        // Above a maximum that was lowered, memory goes back after the refusal, and others may free some meanwhile.
        let live = self.pool.statistics().live_bytes;
        let freed_since = before.reserved_bytes > self.limit && live < numbers.live;
        if numbers.requested != size || (numbers.live != live && !freed_since) {
            return Err(format!("wrong numbers: {error}"));
        }
        Ok(())
    }

    fn free_invalid(&mut self, which: u16, offset: u64) -> Result<(), String> {
        let address = {
            let shadow = self.shadow.lock();
            let Some(base) = shadow.any(which) else { return Ok(()) };
            let address = base.offset(offset);
            if shadow.is_start(address) {
                return Ok(());
            }
            address
        };
        let before = self.pool.statistics();
        let error = match self.pool.free(address) {
            Ok(()) => return Err(format!("{address} was freed and is no block")),
            Err(error) => error,
        };
        let mut after = self.pool.statistics();
        after.refused_frees -= 1;
        if error.invalid_free_reason().is_none() || before != after {
            return Err(format!("{error} changed {before:?} to {after:?}"));
        }
        Ok(())
    }

    fn free_all(&mut self, order: u8) -> Result<(), String> {
        let mut blocks = self.shadow.lock().take_all();
        match order % 3 {
            0 => {}
            1 => blocks.reverse(),
            _ => {
                let (even, odd): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(index, _)| index % 2 == 0);
                blocks = even.into_iter().chain(odd).map(|(_, block)| block).collect();
            }
        }
        for (address, held) in blocks {
            match held {
                Held::Raw => self.pool.free(address),
                Held::Buffer(buffer) => buffer.free().map_err(|error| error.error().clone()),
            }
            .map_err(|error| error.to_string())?;
        }
        let statistics = self.pool.statistics();
        if (statistics.live_bytes, statistics.requested_bytes, statistics.slab_idle_bytes) != (0, 0, 0) {
            return Err(format!("all is freed: {statistics:?}"));
        }
        Ok(())
    }

    fn set_maximum(&mut self, pages: u8, shared: bool) -> Result<(), String> {
        let page = self.pool.page_bytes();
        let maximum = (pages > 0).then(|| u64::from(pages) * page);
        self.bounds[usize::from(shared)] = Bound { maximum, ceiling: self.sim.held_bytes(DEVICE) };
        self.limit = self.bounds.iter().filter_map(|bound| bound.maximum).fold(self.memory, u64::min);
        let faults = self.faults_done();
        let result = if shared {
            self.shared_limit.set_maximum(maximum.unwrap_or(u64::MAX))
        } else {
            // Off the page, as when the pool is built.
            self.pool.set_maximum(maximum.map(|maximum| maximum + page / 3))
        };
        match result {
            Ok(held) if held == self.sim.held_bytes(DEVICE) => Ok(()),
            Ok(held) => Err(format!("it is said that {held} bytes are held, by the device {}", self.sim.held_bytes(DEVICE))),
            Err(error) if error.is_driver() && faults < self.faults_done() => Ok(()),
            Err(error) => Err(format!("setting the maximum failed without a cause: {error}")),
        }
    }

    fn check(&mut self) -> Result<(), String> {
        self.pool.check()?;
        let (statistics, held, peak) = (self.pool.statistics(), self.sim.held_bytes(DEVICE), self.sim.restart_peak(DEVICE));
        if statistics.reserved_bytes != held {
            return Err(format!("the pool counts {} bytes, the device {held}", statistics.reserved_bytes));
        }
        if self.shared_limit.held() != held {
            return Err(format!("the limit counts {} bytes, the device {held}", self.shared_limit.held()));
        }
        for bound in &mut self.bounds {
            if bound.maximum.is_some_and(|maximum| peak > maximum.max(bound.ceiling)) {
                return Err(format!("{peak} bytes were held at some moment, at most {bound:?} are allowed"));
            }
            bound.ceiling = bound.ceiling.min(held);
        }
        let faults = self.faults_done();
        if statistics.unsettled_bytes == 0 {
            self.settled_at = faults;
        } else if !self.undoing_may_fail && faults < self.settled_at + 2 {
            return Err(format!("one failure was not undone: {statistics:?}"));
        }
        let left: u64 = self.reservations.iter().map(Reservation::remaining).sum();
        if statistics.committed_bytes != left {
            return Err(format!("{left} bytes are left of reservations: {statistics:?}"));
        }
        let shadow = self.shadow.lock();
        if statistics.requested_bytes != shadow.requested() || statistics.live_blocks != shadow.len() as u64 {
            return Err(format!("{} blocks of {} bytes are live: {statistics:?}", shadow.len(), shadow.requested()));
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(), String> {
        self.sim.clear_faults();
        self.sim.clear_hook();
        self.amid.lock().pool = None;
        self.free_all(0).map_err(|error| format!("at the end: {error}"))?;
        self.reservations.clear();
        let stale = std::mem::take(&mut self.shadow.lock().stale);
        drop(stale);
        self.check().map_err(|error| format!("at the end: {error}"))?;
        // What no fault keeps from the pool serves one request for all of it.
        let all = self.limit.saturating_sub(self.padding);
        if all > 0 {
            let address = self.pool.allocate(all).map_err(|error| format!("the whole memory in one block: {error}"))?;
            self.pool.free(address).map_err(|error| error.to_string())?;
        }
        match self.pool.trim(0) {
            Ok(0) => {}
            other => return Err(format!("trimming an empty pool to nothing: {other:?}")),
        }
        if self.sim.held_bytes(DEVICE) != 0 {
            return Err(format!("{} bytes are held after a trim to nothing", self.sim.held_bytes(DEVICE)));
        }
        drop(self.pool);
        if self.shared_limit.held() != 0 {
            return Err(format!("the pool is gone, and {} bytes are charged", self.shared_limit.held()));
        }
        self.sim.audit()
    }
}

/// Runs in the middle of a driver call.
fn meanwhile(call: Call, shadow: &Mutex<Shadow>, amid: &Mutex<Amid>) {
    if !call.manages_memory() {
        return;
    }
    let (due, pool) = {
        let mut amid = amid.lock();
        for plan in &mut amid.plans {
            plan.0 = plan.0.saturating_sub(1);
        }
        let due: Vec<_> = amid.plans.extract_if(.., |plan| plan.0 == 0).collect();
        (due, amid.pool.clone())
    };
    let Some(pool) = pool else { return };
    for (_, which, trim) in due {
        // A free may call the driver, and so come back here: nothing is locked then.
        let address = if trim { None } else { shadow.lock().take_raw(which) };
        if trim {
            // It may come upon a planned fault, and it may find nothing; the law of bytes holds all the same.
            let _ = pool.trim(0);
        } else if let Some(address) = address
            && let Err(error) = pool.free(address)
        {
            panic!("freeing {address} in the middle of {}: {error}", call.name());
        }
        let statistics = pool.statistics();
        assert_eq!(statistics.accounted_bytes(), statistics.reserved_bytes, "in the middle of {}: {statistics:?}", call.name());
    }
}

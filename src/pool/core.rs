//! What the pool's lock guards: the layers below, the live blocks and the counts.
//!
//! # Invariants, each in [`Core::check`]
//! - P1 Every live block is found through the directory by its first grain, and every slab by each of its grains.
//! - P2 The law of bytes, at every moment at which the lock is free:
//!   `live + idle in slabs + free + committed + unsettled + padding == reserved`.
//! - P3 `reserved <= capacity`.
//! - P4 No block and no slab begins in what is left of a reservation.

use super::budget::Budget;
use super::request::{Request, Route};
use super::statistics::{ClassStatistics, Statistics};
use crate::arena::{GRAIN_BYTES, Part, Site, Table, Work};
use crate::buddy::{Buddy, Owner, Run, Window};
use crate::error::{CuResult, InvalidFree, OutOfMemory};
use crate::slab::{Class, Slabs, Slot};
use crate::sync::Arc;
use crate::units::DevicePtr;

/// Memory is scarce from where all but one part in so many is held of the limit, or of what the driver has.
const SCARCE: u64 = 8;

/// A live block of grains.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Block {
    pub(super) run: Run,
    pub(super) requested: u64,
    pub(super) serial: u32,
    /// Whether it is to stay on one handle.
    pub(super) one_handle: bool,
}

/// A block just allocated, or a reservation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Served {
    pub(super) address: DevicePtr,
    /// The number of the allocation; of a reservation, its index.
    pub(super) serial: u32,
}

/// Where a live block is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    Block(u32, Block),
    Slot { slab: u32, slot: u32, class: Class, record: Slot },
}

impl Place {
    /// The number of the allocation.
    pub(super) fn serial(&self) -> u32 {
        match self {
            Self::Block(_, block) => block.serial,
            Self::Slot { record, .. } => record.serial,
        }
    }

    /// The bytes asked for, and those that the block takes up.
    pub(super) fn sizes(&self) -> (u64, u64) {
        match self {
            Self::Block(_, block) => (block.requested, u64::from(block.run.len) * GRAIN_BYTES),
            Self::Slot { class, record, .. } => (u64::from(record.requested), class.slot_bytes()),
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    live_blocks: u64,
    live_bytes: u64,
    requested_bytes: u64,
    peak_live_bytes: u64,
    peak_requested_bytes: u64,
    peak_reserved_bytes: u64,
    allocations: u64,
    deallocations: u64,
    pub(super) failed_allocations: u64,
    refused_frees: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) buddy: Buddy,
    pub(super) slabs: Slabs,
    pub(super) blocks: Table<Block>,
    /// What is left of each reservation.
    pub(super) reservations: Table<Run>,
    /// The number of the last allocation, to tell a stale owner from the present one.
    serial: u32,
    pub(super) counts: Counts,
    budget: Budget,
    /// The most bytes that may be held.
    pub(super) capacity: Option<u64>,
    /// What was held when the driver last had no more, until it has.
    pub(super) refused_at: Option<u64>,
    /// Whether the driver gave few handles where it had refused many.
    pub(super) few_handles: bool,
    /// How many pieces of work are under way.
    pub(super) works: u32,
    /// Counts the pieces of work that began.
    pub(super) begun: u64,
    /// Counts the pieces of work that brought pages or addresses, or gave something back.
    pub(super) progress: u64,
    /// Whether addresses are being reserved.
    pub(super) reserving: bool,
    /// Free grains that windows under way have taken out of the tree.
    window_grains: u64,
}

impl Core {
    pub(super) fn new(site: Arc<Site>, capacity: Option<u64>, slack: f64) -> Self {
        Self {
            buddy: Buddy::new(site),
            slabs: Slabs::new(),
            blocks: Table::default(),
            reservations: Table::default(),
            serial: 0,
            counts: Counts::default(),
            budget: Budget::new(slack),
            capacity,
            refused_at: None,
            few_handles: false,
            works: 0,
            begun: 0,
            progress: 0,
            reserving: false,
            window_grains: 0,
        }
    }

    // ---- allocate: down the layers ----

    /// Serves a request from memory that is there.
    pub(super) fn serve(&mut self, request: &Request) -> Option<Served> {
        if let Route::Slab(class) = request.route
            && let Some(served) = self.take_slot(class, request)
        {
            return Some(served);
        }
        let run = self.buddy.take(request.shape, self.is_scarce())?;
        self.budget.note_taken(run.len, self.buddy.taken_grains());
        self.accept(run, request)
    }

    /// Serves a request from a run that was taken for it. `None`, and the run is free again, where that was to make a block
    /// longer that is not what it was.
    pub(super) fn accept(&mut self, run: Run, request: &Request) -> Option<Served> {
        match request.route {
            Route::Slab(class) => {
                // While the run was on its way, a slot may have become free.
                if let Some(served) = self.take_slot(class, request) {
                    self.buddy.give(run);
                    return Some(served);
                }
                let slab = self.slabs.adopt(class, run);
                for grain in run.start..run.end() {
                    self.buddy.directory.set(grain, Owner::Slab(slab));
                }
                Some(self.take_slot(class, request).expect("S2: a new slab has a free slot"))
            }
            Route::Run => {
                let serial = self.next_serial();
                let index = self.blocks.insert(Block { run, requested: request.size, serial, one_handle: request.shape.one_handle });
                self.buddy.directory.set(run.start, Owner::Block(index));
                self.count_allocation(request);
                Some(Served { address: self.buddy.arena.address_of(run.start), serial })
            }
            Route::Reservation => {
                let address = self.buddy.arena.address_of(run.start);
                Some(Served { address, serial: self.reservations.insert(run) })
            }
            Route::Extension(index, serial) => self.lengthen(index, serial, run, request.size),
        }
    }

    fn take_slot(&mut self, class: Class, request: &Request) -> Option<Served> {
        let serial = self.serial.wrapping_add(1);
        let (_, grain, slot) = self.slabs.take(class, Slot { requested: request.size as u32, serial })?;
        self.serial = serial;
        self.count_allocation(request);
        let address = self.buddy.arena.address_of(grain).offset(u64::from(slot) * class.slot_bytes());
        Some(Served { address, serial })
    }

    fn next_serial(&mut self) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.serial
    }

    fn count_allocation(&mut self, request: &Request) {
        let counts = &mut self.counts;
        counts.allocations += 1;
        counts.live_blocks += 1;
        self.count_live(request.block_bytes(), request.size);
    }

    /// Counts more bytes of live blocks: in slots and grains, and as asked for.
    pub(super) fn count_live(&mut self, bytes: u64, requested: u64) {
        let counts = &mut self.counts;
        counts.live_bytes += bytes;
        counts.requested_bytes += requested;
        counts.peak_live_bytes = counts.peak_live_bytes.max(counts.live_bytes);
        counts.peak_requested_bytes = counts.peak_requested_bytes.max(counts.requested_bytes);
    }

    // ---- free: back up ----

    /// Frees the block that begins at an address; with `serial`, only that allocation. A refusal changes nothing but
    /// its count.
    pub(super) fn free(&mut self, address: DevicePtr, serial: Option<u32>) -> Result<(), InvalidFree> {
        let place = self.find_allocation(address, serial).inspect_err(|_| self.counts.refused_frees += 1)?;
        let (requested, bytes) = place.sizes();
        match place {
            Place::Block(index, block) => {
                self.blocks.remove(index);
                self.buddy.directory.set(block.run.start, Owner::Nothing);
                self.buddy.give(block.run);
            }
            Place::Slot { slab, slot, .. } => {
                if let Some(run) = self.slabs.give(slab, slot) {
                    for grain in run.start..run.end() {
                        self.buddy.directory.set(grain, Owner::Nothing);
                    }
                    self.buddy.give(run);
                }
            }
        }
        self.counts.deallocations += 1;
        self.counts.live_blocks -= 1;
        self.counts.live_bytes -= bytes;
        self.counts.requested_bytes -= requested;
        Ok(())
    }

    /// The live block that begins at an address: what was asked for, and its serial.
    pub(super) fn live(&self, address: DevicePtr) -> Result<(u64, u32), InvalidFree> {
        self.find(address).map(|place| (place.sizes().0, place.serial()))
    }

    /// Finds the block that begins at an address; with `serial`, only that allocation's.
    pub(super) fn find_allocation(&self, address: DevicePtr, serial: Option<u32>) -> Result<Place, InvalidFree> {
        let place = self.find(address)?;
        if serial.is_some_and(|serial| serial != place.serial()) { Err(InvalidFree::Stale) } else { Ok(place) }
    }

    fn find(&self, address: DevicePtr) -> Result<Place, InvalidFree> {
        let (grain, offset) = self.buddy.arena.grain_of(address).ok_or(InvalidFree::Foreign)?;
        match self.buddy.directory.get(grain) {
            Owner::Block(index) => {
                let block = *self.blocks.get(index).expect("P1: the directory names blocks in the table");
                if offset == 0 { Ok(Place::Block(index, block)) } else { Err(InvalidFree::Interior) }
            }
            Owner::Slab(index) => {
                let slab = self.slabs.get(index).expect("P1: the directory names slabs in the table");
                let offset = u64::from(grain - slab.run.start) * GRAIN_BYTES + offset;
                let (slot, inside) = ((offset / slab.class.slot_bytes()) as u32, offset % slab.class.slot_bytes());
                match slab.live(slot) {
                    Some(_) if inside != 0 => Err(InvalidFree::Interior),
                    Some(record) => Ok(Place::Slot { slab: index, slot, class: slab.class, record }),
                    None => Err(InvalidFree::NotLive),
                }
            }
            Owner::Nothing if self.buddy.is_taken(grain) && !self.is_committed(grain) => Err(InvalidFree::Interior),
            Owner::Nothing => Err(InvalidFree::NotLive),
        }
    }

    // ---- work under way ----

    /// Takes a window and begins to map these parts under it.
    pub(super) fn begin_map(&mut self, window: &Window, parts: &[Part]) -> (Work, Vec<Run>) {
        let (work, free_parts) = self.buddy.begin_map(window, parts);
        self.window_grains += free_parts.iter().map(|run| u64::from(run.len)).sum::<u64>();
        self.begin_work();
        (work, free_parts)
    }

    pub(super) fn begin_plain(&mut self, pages: u32) -> Work {
        let work = self.buddy.arena.begin_plain(pages);
        self.begin_work();
        work
    }

    pub(super) fn begin_release(&mut self, handles: &[u32]) -> Work {
        let work = self.buddy.begin_release(handles);
        self.begin_work();
        work
    }

    pub(super) fn begin_work(&mut self) {
        self.works += 1;
        self.begun += 1;
        self.counts.peak_reserved_bytes = self.counts.peak_reserved_bytes.max(self.buddy.arena.held_bytes());
    }

    pub(super) fn end_work(&mut self, progress: bool) {
        self.works -= 1;
        self.progress += u64::from(progress);
    }

    /// Books finished work. `parts` are the window's free runs; `keep` is what its request gets, if the work succeeded.
    /// Whether any page is mapped that was not.
    pub(super) fn settle(&mut self, work: Work, parts: &[Run], keep: Option<Run>) -> bool {
        let (before, gives_back, moves) = (self.buddy.arena.held_bytes(), work.gives_back(), work.moves());
        self.window_grains -= parts.iter().map(|run| u64::from(run.len)).sum::<u64>();
        let mapped = self.buddy.settle(work, keep.unwrap_or_default());
        match keep {
            Some(run) => {
                self.budget.note_moved(moves);
                self.refused_at = self.refused_at.filter(|&limit| self.buddy.arena.held_bytes() <= limit);
                self.budget.note_taken(run.len, self.buddy.taken_grains());
            }
            None => self.buddy.put_back(parts),
        }
        // What a failed growth was charged is no progress: it was not held before. Nor is what it has put back.
        self.end_work(keep.is_some() || (mapped && moves == 0) || (gives_back && self.buddy.arena.held_bytes() < before));
        mapped
    }

    /// Whether memory is scarce: nearly as much is held as may be.
    pub(super) fn is_scarce(&self) -> bool {
        let limit = self.capacity.into_iter().chain(self.refused_at).min();
        limit.is_some_and(|limit| self.buddy.arena.held_bytes() >= limit - limit / SCARCE)
    }

    /// The budget, and how many more bytes to take from the driver for a request of `grains` before handles are moved.
    pub(super) fn budget(&self, grains: u32) -> (u64, u64) {
        let budget = self.budget.bytes(self.buddy.taken_grains() + u64::from(grains));
        (budget, budget.saturating_sub(self.buddy.arena.held_bytes()))
    }

    // ---- numbers ----

    /// Begins to count anew, but for what is held.
    pub(super) fn forget_history(&mut self) {
        self.counts = Counts { peak_reserved_bytes: self.counts.peak_reserved_bytes, ..Counts::default() };
    }

    pub(super) fn out_of_memory(&self, request: &Request, code: Option<CuResult>, driver_free: Option<u64>) -> OutOfMemory {
        let growing_from = self.growing_from(request);
        OutOfMemory {
            requested: request.size,
            rounded: growing_from.unwrap_or_default() + request.block_bytes(),
            alignment: request.alignment,
            contiguous: request.shape.one_handle,
            left_of_reservation: None,
            growing_from,
            live: self.counts.live_bytes,
            idle: self.buddy.free_bytes(),
            largest_free: self.buddy.largest_free_bytes(),
            committed: self.committed_bytes(),
            reserved: self.buddy.arena.held_bytes(),
            capacity: self.capacity,
            device: self.buddy.arena.site().device,
            code,
            driver_free,
        }
    }

    pub(super) fn statistics(&self) -> Statistics {
        let counts = &self.counts;
        let classes: Vec<ClassStatistics> = Class::all()
            .map(|class| {
                let class_use = self.slabs.class_use(class);
                ClassStatistics {
                    slot_bytes: class.slot_bytes(),
                    slabs: class_use.slabs,
                    slab_bytes: class_use.slabs * class.slab_bytes(),
                    live_slots: class_use.live_slots,
                    requested_bytes: class_use.requested_bytes,
                }
            })
            .collect();
        let slab_bytes: u64 = classes.iter().map(|class| class.slab_bytes).sum();
        let slot_bytes: u64 = classes.iter().map(|class| class.live_slots * class.slot_bytes).sum();
        Statistics {
            requested_bytes: counts.requested_bytes,
            live_bytes: counts.live_bytes,
            live_blocks: counts.live_blocks,
            slab_idle_bytes: slab_bytes - slot_bytes,
            free_bytes: self.buddy.free_bytes(),
            largest_free_bytes: self.buddy.largest_free_bytes(),
            committed_bytes: self.committed_bytes(),
            unsettled_bytes: self.buddy.arena.unsettled_bytes() + self.window_grains * GRAIN_BYTES,
            padding_bytes: self.buddy.arena.padding_bytes(),
            reserved_bytes: self.buddy.arena.held_bytes(),
            capacity_bytes: self.capacity,
            peak_requested_bytes: counts.peak_requested_bytes,
            peak_live_bytes: counts.peak_live_bytes,
            peak_reserved_bytes: counts.peak_reserved_bytes,
            allocations: counts.allocations,
            deallocations: counts.deallocations,
            failed_allocations: counts.failed_allocations,
            refused_frees: counts.refused_frees,
            large_blocks: self.blocks.len() as u64,
            classes,
        }
    }

    /// Checks P1 to P4, and every layer below where no work is under way.
    ///
    /// # Errors
    /// The first violation found.
    pub(super) fn check(&self) -> Result<(), String> {
        self.slabs.check()?;
        let statistics = self.statistics();
        if statistics.accounted_bytes() != statistics.reserved_bytes {
            return Err(format!("P2: {} bytes are accounted for: {statistics:?}", statistics.accounted_bytes()));
        }
        if self.capacity.is_some_and(|capacity| statistics.reserved_bytes > capacity) {
            return Err(format!("P3: over capacity: {statistics:?}"));
        }
        let mut taken = self.slabs.grains();
        for (index, rest) in self.reservations.iter() {
            taken += u64::from(rest.len);
            if (rest.start..rest.end()).any(|grain| self.buddy.directory.get(grain) != Owner::Nothing) {
                return Err(format!("P4: what is left of reservation {index}, {rest:?}, has another owner"));
            }
        }
        let mut requested = statistics.classes.iter().map(|class| class.requested_bytes).sum::<u64>();
        for (index, block) in self.blocks.iter() {
            taken += u64::from(block.run.len);
            requested += block.requested;
            if self.buddy.directory.get(block.run.start) != Owner::Block(index) {
                return Err(format!("P1: block {index} is not found by its first grain"));
            }
        }
        for (index, slab) in self.slabs.iter() {
            if (slab.run.start..slab.run.end()).any(|grain| self.buddy.directory.get(grain) != Owner::Slab(index)) {
                return Err(format!("P1: slab {index} is not found by each of its grains"));
            }
        }
        if requested != statistics.requested_bytes {
            return Err(format!("P1: {requested} bytes are asked for, {} are counted", statistics.requested_bytes));
        }
        if self.works == 0 { self.buddy.check(taken) } else { Ok(()) }
    }
}

//! The slow path: a request that no free run serves, and memory going back to the driver.
//!
//! Each turn of the loop looks for free memory first, then plans one piece of work under the lock, does it without, and
//! books it under the lock again. Rules that hold on every path:
//!
//! - I1 A window leaves the tree whole before the lock drops; nothing merges into it.
//! - I2 Its bytes are charged to the limit before the first driver call.
//! - I3 A handle is in one state with one holder: in the table, or in one piece of work.
//! - I4 A handle to be given back is chosen under the lock, all its grains free, and its grains leave the tree in that
//!   same section.
//! - I5 A mapped window goes to its requester; only the rest goes to the tree.
//! - I6 A failure at any call puts back what was there.
//! - I7 Nobody reports a lack of memory while other work is under way: wait for it and look again. A refusal by the driver
//!   counts only where no other work was under way at any time during the attempt; otherwise that may have been its
//!   cause, and the attempt is made again, alone. What a failed growth had taken for a moment is no news to anyone, so
//!   requests that cannot be served do not keep each other trying.
//! - I8 Access is set before anyone gets a page.

use super::Shared;
use super::core::{Core, Served};
use super::request::Request;
use crate::arena::{Failure, GRAIN_BYTES, Work};
use crate::buddy::{Filling, Run, Search, Shape, Window, fill};
use crate::driver::{Call, MemoryKind};
use crate::error::{CuResult, Error, OutOfMemory, Result};
use crate::sync::MutexGuard;
use crate::units::{GIB, MIB, align_down};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The largest handle, in bytes.
const MAX_HANDLE_BYTES: u64 = 32 * MIB;
/// A new handle is at most one part in so many of the request it is made for, of the pool's budget, and of what may still be
/// taken. Making and mapping cost per handle; but only a handle that is wholly free can be moved or given back.
const HANDLES_PER_REQUEST: u64 = 8;
const HANDLES_PER_BUDGET: u64 = 64;
const HANDLES_PER_ROOM: u64 = 64;
/// What addresses are reserved for at first, in multiples of the memory.
const ADDRESSES_PER_MEMORY: u64 = 8;
/// The most that is reserved at first, in bytes, so that a hundred pools fit in the address space of one process.
const MAX_FIRST_ADDRESSES: u64 = 512 * GIB;
/// What is reserved for a request where addresses are scarce, in multiples of the request.
const ADDRESSES_PER_REQUEST: u64 = 4;

/// What one request has learnt on its way.
#[derive(Debug)]
struct Attempt {
    /// How much to map at once, in bytes: a wish beyond the need, halved at each refusal.
    step_bytes: u64,
    /// What the driver seems to have left, in bytes, once it has refused.
    driver_room: Option<u64>,
    /// The code with which it refused.
    code: Option<CuResult>,
    /// What it said it had free when it last refused, in bytes.
    driver_free: Option<u64>,
    /// Whether to ask for as few handles as possible: it refused while it had memory.
    coarse: bool,
    /// Whether no addresses can be reserved, so that only plain allocations are left.
    no_addresses: bool,
    /// Whether a plain allocation came at an address that could not be used, and another one would fare no better.
    misplaced: bool,
    /// Whether the driver refused while other work was under way: the next attempt waits until there is none.
    contested: bool,
    /// The core's count of progress that this attempt knows of. More than that is others' doing: what the driver has left
    /// may have changed, in memory and in addresses.
    progress: u64,
    /// Whether the driver was asked once more to take back what it would not take before.
    stuck_tried: bool,
}

/// The next thing to do for a request.
enum Step {
    /// Map a window; the request gets `run`. `beyond` says that more is asked for than it needs.
    Map { work: Work, parts: Vec<Run>, run: Run, beyond: bool },
    /// Make a plain allocation.
    Plain { work: Work, beyond: bool },
    /// Give idle handles back, to make room.
    Release { work: Work },
    /// Give back what the driver would not take before.
    ReleaseStuck { work: Work },
    /// Reserve addresses for a run of this shape.
    Reserve,
    /// Wait until other work is settled.
    Wait,
    /// Give up.
    Refuse,
}

/// What the driver was asked for when it refused.
struct Asked {
    bytes: u64,
    handles: usize,
    /// Whether that was more than the request needs.
    beyond: bool,
    /// How many pieces of work had begun, this one being the last; `None` where others were under way.
    alone_since: Option<u64>,
}

impl Asked {
    fn new(core: &Core, work: &Work, beyond: bool) -> Self {
        Self { bytes: work.bytes(), handles: work.pieces(), beyond, alone_since: (core.works == 1).then_some(core.begun) }
    }
}

/// How much may be taken from the driver, in bytes.
#[derive(Clone, Copy)]
struct Room {
    /// At all: what the limit leaves, and the driver, as far as that is known.
    hard: u64,
    /// Before idle handles are moved instead.
    soft: u64,
    /// The budget, of which `soft` is what is left.
    budget: u64,
}

/// How growing ended.
enum Grown {
    Done,
    /// The driver has no memory, and says it has this much.
    Refused(Option<u64>),
    Failed(Failure),
}

/// Work under way. Dropped without being settled, which a panic in the driver does, it takes back what was done.
struct UnderWay<'a> {
    shared: &'a Shared,
    work: Option<Work>,
    parts: Vec<Run>,
}

impl<'a> UnderWay<'a> {
    fn new(shared: &'a Shared, work: Work, parts: Vec<Run>) -> Self {
        Self { shared, work: Some(work), parts }
    }

    fn work(&mut self) -> &mut Work {
        self.work.as_mut().expect("work is under way until it is settled")
    }

    /// Books the work and wakes whoever waits for it. Returns with the lock held, and whether any page is mapped.
    fn settle(mut self, keep: Option<Run>) -> (MutexGuard<'a, Core>, bool) {
        let work = self.work.take().expect("work is settled once");
        self.shared.settle(work, &self.parts, keep)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if let Some(mut work) = self.work.take() {
            // The driver is panicking already; a second panic must not end the process.
            let _ = catch_unwind(AssertUnwindSafe(|| work.release()));
            drop(self.shared.settle(work, &self.parts, None));
        }
    }
}

/// A reservation of addresses under way.
struct Reserving<'a> {
    shared: &'a Shared,
    done: bool,
}

impl Drop for Reserving<'_> {
    fn drop(&mut self) {
        let mut core = self.shared.core.lock();
        core.reserving = false;
        core.end_work(self.done);
        drop(core);
        self.shared.settled.notify_all();
    }
}

impl Shared {
    fn settle(&self, work: Work, parts: &[Run], keep: Option<Run>) -> (MutexGuard<'_, Core>, bool) {
        let mut core = self.core.lock();
        let mapped = core.settle(work, parts, keep);
        self.settled.notify_all();
        (core, mapped)
    }

    /// Serves a request that no free memory serves.
    ///
    /// # Errors
    /// Out of memory, or the driver's failure.
    pub(super) fn grow(&self, request: &Request) -> Result<Served> {
        loop {
            let numbers = match self.grow_or_refuse(request)? {
                Ok(served) => return Ok(served),
                Err(numbers) => numbers,
            };
            // No lock is held: the callback may use the pool. What it frees is looked at first.
            if !self.on_out_of_memory.as_ref().is_some_and(|callback| (callback.0)(&numbers)) {
                return Err(Error::out_of_memory(numbers));
            }
        }
    }

    fn grow_or_refuse(&self, request: &Request) -> Result<Result<Served, OutOfMemory>> {
        let mut attempt = Attempt {
            // A wish beyond all memory is a wish for all of it.
            step_bytes: self.growth_bytes.min(self.memory_bytes),
            driver_room: None,
            code: None,
            driver_free: None,
            coarse: false,
            no_addresses: !self.site.maps_pages,
            misplaced: false,
            contested: false,
            progress: 0,
            stuck_tried: false,
        };
        let mut core = self.core.lock();
        attempt.progress = core.progress;
        loop {
            if let Some(served) = core.serve(request) {
                return Ok(Ok(served));
            }
            if attempt.progress != core.progress {
                attempt.progress = core.progress;
                attempt.driver_room = None;
                attempt.no_addresses = !self.site.maps_pages;
            }
            match self.plan(&mut core, request, &attempt) {
                Step::Map { work, parts, run, beyond } => {
                    let asked = Asked::new(&core, &work, beyond);
                    drop(core);
                    let mut under_way = UnderWay::new(self, work, parts);
                    let grown = self.call_to_grow(under_way.work(), &asked);
                    (core, _) = under_way.settle(matches!(grown, Grown::Done).then_some(run));
                    match grown {
                        Grown::Done => return Ok(Ok(core.accept(run, request))),
                        Grown::Refused(free) => self.learn(&core, &mut attempt, &asked, free),
                        Grown::Failed(failure) => return Err(Error::driver(failure.call.name(), failure.code)),
                    }
                }
                Step::Plain { work, beyond } => {
                    let asked = Asked::new(&core, &work, beyond);
                    let padding = core.buddy.arena.plain_bytes(0);
                    drop(core);
                    let mut under_way = UnderWay::new(self, work, Vec::new());
                    let grown = self.call_to_grow(under_way.work(), &asked);
                    let mapped;
                    (core, mapped) = under_way.settle(None);
                    // The new run and its requester meet before the lock drops.
                    match grown {
                        Grown::Done if mapped => {}
                        Grown::Done => {
                            // The next one is asked for with padding, unless that would not help.
                            attempt.misplaced = core.buddy.arena.plain_bytes(0) == padding;
                            let work = core.begin_release(&[]);
                            core = self.give_back(core, work)?;
                            attempt.progress += 1;
                        }
                        Grown::Refused(free) => self.learn(&core, &mut attempt, &asked, free),
                        Grown::Failed(failure) => return Err(Error::driver(failure.call.name(), failure.code)),
                    }
                }
                Step::Release { work } => {
                    let bytes = work.bytes();
                    core = self.give_back(core, work)?;
                    attempt.progress += 1;
                    attempt.driver_room = attempt.driver_room.map(|room| room.saturating_add(bytes));
                }
                Step::ReleaseStuck { work } => {
                    drop(core);
                    attempt.stuck_tried = true;
                    let mut under_way = UnderWay::new(self, work, Vec::new());
                    // It may well refuse again, and the request fails all the same then.
                    let _ = under_way.work().release();
                    (core, _) = under_way.settle(None);
                    attempt.driver_room = None;
                }
                Step::Reserve => {
                    core.begin_work();
                    core.reserving = true;
                    drop(core);
                    let mut reserving = Reserving { shared: self, done: false };
                    reserving.done = self.reserve(request.shape)?;
                    attempt.no_addresses = !reserving.done;
                    attempt.progress += u64::from(reserving.done);
                    drop(reserving);
                    core = self.core.lock();
                }
                Step::Wait => core = self.settled.wait(core),
                Step::Refuse => {
                    // A slab needs several grains in a row; the request itself may need one.
                    return Ok(core
                        .serve(&request.without_slab())
                        .ok_or_else(|| core.out_of_memory(request, attempt.code, attempt.driver_free)));
                }
            }
        }
    }

    /// Gives handles back without the lock.
    ///
    /// # Errors
    /// The driver's failure; the work is settled all the same.
    fn give_back<'a>(&'a self, core: MutexGuard<'a, Core>, work: Work) -> Result<MutexGuard<'a, Core>> {
        drop(core);
        let mut under_way = UnderWay::new(self, work, Vec::new());
        let outcome = under_way.work().release();
        let (core, _) = under_way.settle(None);
        outcome.map_err(|failure| Error::driver(failure.call.name(), failure.code))?;
        Ok(core)
    }

    /// Calls the driver for work that takes memory. Where it refuses, it is asked what it has left while the work still
    /// counts as under way.
    fn call_to_grow(&self, work: &mut Work, asked: &Asked) -> Grown {
        let mut outcome = work.grow();
        if cfg!(vrampool_fault = "late_charge") && outcome.is_ok() {
            outcome = self.check_limit_too_late(work);
        }
        match outcome {
            Ok(()) => Grown::Done,
            Err(failure) if failure.code != CuResult::ERROR_OUT_OF_MEMORY => Grown::Failed(failure),
            Err(_) if asked.beyond => Grown::Refused(None),
            Err(_) => Grown::Refused(self.driver_free()),
        }
    }

    /// Draws the conclusions from a refusal; `free` is what the driver says it has.
    fn learn(&self, core: &Core, attempt: &mut Attempt, asked: &Asked, free: Option<u64>) {
        attempt.code = Some(CuResult::ERROR_OUT_OF_MEMORY);
        if asked.beyond {
            attempt.step_bytes /= 2;
            return;
        }
        attempt.contested = asked.alone_since != Some(core.begun);
        if attempt.contested {
            return;
        }
        attempt.driver_free = free;
        // Where the driver does not say, all that is known is that it has less than this.
        let free = free.unwrap_or(asked.bytes);
        if free >= asked.bytes && asked.handles > 1 && !attempt.coarse {
            attempt.coarse = true;
        } else {
            attempt.driver_room = Some(free.min(asked.bytes - self.site.page_bytes));
        }
    }

    /// The bytes that the driver has left, by its own word; `None` for memory of the host, of which it says nothing.
    fn driver_free(&self) -> Option<u64> {
        let info = (self.site.kind == MemoryKind::Device).then(|| self.site.driver.memory_info(self.site.device));
        info?.ok().map(|info| info.free_bytes)
    }

    /// The planted fault of a limit that is looked at after the memory was taken.
    fn check_limit_too_late(&self, work: &mut Work) -> Result<(), Failure> {
        let core = self.core.lock();
        if core.capacity.is_some_and(|capacity| core.buddy.arena.held_bytes() > capacity) {
            drop(core);
            let _ = work.release();
            return Err(Failure { call: Call::MemCreate, code: CuResult::ERROR_OUT_OF_MEMORY });
        }
        Ok(())
    }

    /// Plans one step for a request that nothing free serves. Under the lock.
    fn plan(&self, core: &mut Core, request: &Request, attempt: &Attempt) -> Step {
        if attempt.contested && core.works > 0 {
            return Step::Wait;
        }
        let own_room = match core.capacity {
            Some(_) if cfg!(vrampool_fault = "late_charge") => u64::MAX,
            Some(capacity) => capacity.saturating_sub(core.buddy.arena.held_bytes()),
            None => u64::MAX,
        };
        let room = own_room.min(attempt.driver_room.unwrap_or(u64::MAX));
        let shape = request.shape;
        if self.site.maps_pages {
            // Fast where there is memory: the best of a few windows, and within the budget.
            let (budget, wish) = core.budget(shape.grains);
            let search = if core.is_scarce() { Search::Thrifty } else { Search::Quick };
            let room = Room { hard: room, soft: room.min(wish), budget };
            if let Some(best) = core.buddy.windows(shape, search).first()
                && let Some(step) = self.fill(core, best, attempt, room)
            {
                return step;
            }
            // At the limit, every window is looked at, together with what would have to be moved or go for it.
            let idle: u64 = core.buddy.idle_handles(None).iter().map(|idle| idle.bytes).sum();
            for window in core.buddy.windows(shape, Search::Exhaustive) {
                if self.bytes_of(&window) <= room.hard.saturating_add(idle)
                    && let Some(step) = self.fill(core, &window, attempt, room)
                {
                    return step;
                }
            }
            let pages_bytes = (u64::from(shape.grains) * GRAIN_BYTES).next_multiple_of(self.site.page_bytes);
            let missing = !core.buddy.has_hole(address_bytes(shape, self.site.page_bytes) / self.site.page_bytes);
            if !attempt.no_addresses && missing && pages_bytes <= room.hard.saturating_add(idle) {
                // Another thread's addresses may do for this one, too.
                return if core.reserving { Step::Wait } else { Step::Reserve };
            }
        }
        if attempt.no_addresses {
            let slack = if shape.alignment > GRAIN_BYTES { shape.alignment } else { 0 };
            let least = (u64::from(shape.grains) * GRAIN_BYTES + slack).next_multiple_of(self.site.page_bytes);
            let room_without_padding = room.saturating_sub(core.buddy.arena.plain_bytes(0));
            let bytes = least.max(align_down(attempt.step_bytes.min(room_without_padding), self.site.page_bytes));
            let pages = (bytes / self.site.page_bytes) as u32;
            let needed = core.buddy.arena.plain_bytes(pages);
            if needed <= room && !attempt.misplaced {
                return Step::Plain { work: core.begin_plain(pages), beyond: bytes > least };
            }
            if let Some(work) = needed.checked_sub(room).and_then(|short| self.make_room(core, None, short)) {
                return Step::Release { work };
            }
        }
        if !attempt.stuck_tried && core.buddy.arena.has_stuck_pieces() {
            return Step::ReleaseStuck { work: core.begin_release(&[]) };
        }
        // I7: what others are doing may serve this request.
        if core.works > 0 { Step::Wait } else { Step::Refuse }
    }

    fn bytes_of(&self, window: &Window) -> u64 {
        u64::from(window.missing_pages) * self.site.page_bytes
    }

    /// How a window comes by its missing pages: from the driver as far as the budget goes, from idle handles, and from the
    /// driver again. `None` where all that is too little.
    fn fill(&self, core: &mut Core, window: &Window, attempt: &Attempt, room: Room) -> Option<Step> {
        let page_bytes = self.site.page_bytes;
        let needed = self.bytes_of(window);
        let handle_pages = self.handle_pages(window, attempt, room);
        if needed <= room.soft {
            let mut missing = window.missing.clone();
            let extra = attempt.step_bytes.saturating_sub(needed).min(room.hard - needed) / page_bytes;
            if let Some(last) = missing.last_mut() {
                last.count += core.buddy.arena.hole_from(last.end()).count.min(u32::try_from(extra).unwrap_or(u32::MAX));
            }
            return Some(self.map(core, window, &fill(&missing, &[], u32::MAX, handle_pages)));
        }
        let idle = core.buddy.idle_handles(Some(window));
        if needed > room.hard.saturating_add(idle.iter().map(|idle| idle.bytes).sum()) {
            return None;
        }
        for most in [room.soft, room.hard] {
            let most_pages = u32::try_from(most / page_bytes).unwrap_or(u32::MAX);
            let filling = fill(&window.missing, &idle, most_pages, handle_pages);
            let short = filling.new_pages.saturating_sub(most_pages);
            if short == 0 {
                return Some(self.map(core, window, &filling));
            }
            // Handles that fit in no gap go, and smaller ones are made in their place.
            let (mut chosen, mut pages) = (Vec::new(), 0);
            for idle in filling.too_large {
                if pages >= short {
                    break;
                }
                chosen.push(idle.handle);
                pages += idle.pages.count;
            }
            if pages >= short {
                return Some(Step::Release { work: core.begin_release(&chosen) });
            }
        }
        None
    }

    /// The most pages that a new handle under a window is to have.
    fn handle_pages(&self, window: &Window, attempt: &Attempt, room: Room) -> u32 {
        if attempt.coarse {
            return 1 << 30;
        }
        let bytes = [
            MAX_HANDLE_BYTES,
            u64::from(window.run.len) * GRAIN_BYTES / HANDLES_PER_REQUEST,
            room.budget / HANDLES_PER_BUDGET,
            room.hard / HANDLES_PER_ROOM,
        ];
        let bytes = bytes.into_iter().min().unwrap_or_default();
        1 << (bytes / self.site.page_bytes).max(1).ilog2()
    }

    fn map(&self, core: &mut Core, window: &Window, filling: &Filling) -> Step {
        let (work, parts) = core.begin_map(window, &filling.parts);
        let beyond = u64::from(filling.new_pages) * self.site.page_bytes > self.bytes_of(window);
        Step::Map { work, parts, run: window.run, beyond }
    }

    /// Begins to give back idle handles of at least `bytes` bytes, none of them under `spare`; `None` where there are
    /// not that many.
    fn make_room(&self, core: &mut Core, spare: Option<&Window>, bytes: u64) -> Option<Work> {
        let (chosen, sum) = idle_handles(core, spare, bytes);
        (sum >= bytes && sum > 0).then(|| core.begin_release(&chosen))
    }

    /// Reserves addresses in which a run of this shape fits. Whether that worked.
    ///
    /// # Errors
    /// A failure that is not a refusal.
    fn reserve(&self, shape: Shape) -> Result<bool> {
        let page_bytes = self.site.page_bytes;
        let needed = address_bytes(shape, page_bytes);
        let mut sizes = Vec::new();
        if !self.core.lock().buddy.arena.addresses_scarce() {
            let generous = self.memory_bytes.saturating_mul(ADDRESSES_PER_MEMORY).min(MAX_FIRST_ADDRESSES).max(needed);
            sizes.push(1 << generous.ilog2());
        }
        let mut modest = needed.saturating_mul(ADDRESSES_PER_REQUEST);
        while modest > needed {
            sizes.push(modest.next_multiple_of(page_bytes));
            modest /= 2;
        }
        sizes.push(needed);
        for size in sizes.into_iter().filter(|&size| size >= needed) {
            let alignment = if size.is_power_of_two() { size.min(GIB).max(page_bytes) } else { page_bytes };
            match self.site.driver.mem_address_reserve(size, alignment) {
                Ok(base) => {
                    if self.core.lock().buddy.arena.add_region(base, size).is_some() {
                        return Ok(true);
                    }
                    // The index space has no place for so many. What cannot be given back now is lost: it is only addresses.
                    let _ = self.site.driver.mem_address_free(base, size);
                }
                Err(CuResult::ERROR_OUT_OF_MEMORY | CuResult::ERROR_INVALID_VALUE | CuResult::ERROR_NOT_SUPPORTED) => {
                    self.core.lock().buddy.arena.note_addresses_scarce();
                }
                Err(code) => return Err(Error::driver(Call::MemAddressReserve.name(), code)),
            }
        }
        Ok(false)
    }

    /// Gives idle handles back until at most `to` bytes are held, or none is left. What is held then, in bytes.
    ///
    /// # Errors
    /// The driver's failure.
    pub(super) fn trim(&self, to: u64) -> Result<u64> {
        if self.has_ended() {
            return Ok(0);
        }
        let mut core = self.core.lock();
        loop {
            let held = core.buddy.arena.held_bytes();
            if held <= to {
                return Ok(held);
            }
            let (chosen, _) = idle_handles(&core, None, held - to);
            if chosen.is_empty() && !core.buddy.arena.has_stuck_pieces() {
                return Ok(held);
            }
            let work = core.begin_release(&chosen);
            core = self.give_back(core, work)?;
        }
    }
}

/// Idle handles, highest address first, as many as come to `bytes` bytes, or all that there are; and their bytes. None lies
/// under `spare`.
fn idle_handles(core: &Core, spare: Option<&Window>, bytes: u64) -> (Vec<u32>, u64) {
    let (mut chosen, mut sum) = (Vec::new(), 0);
    for idle in core.buddy.idle_handles(spare) {
        if sum >= bytes {
            break;
        }
        chosen.push(idle.handle);
        sum += idle.bytes;
    }
    (chosen, sum)
}

/// The addresses that are sure to hold a run of a shape, in bytes: whole pages, and room to align it.
fn address_bytes(shape: Shape, page_bytes: u64) -> u64 {
    let slack = shape.alignment.saturating_sub(page_bytes);
    (u64::from(shape.grains) * GRAIN_BYTES).next_multiple_of(page_bytes) + slack
}

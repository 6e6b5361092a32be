//! The slow path: a request that no free run serves.
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
use super::plan::{Attempt, Handles, Step};
use super::request::Request;
use crate::arena::{Failure, GRAIN_BYTES, Work};
use crate::buddy::Run;
use crate::driver::{AccessDescriptor, AccessFlags, Call, MemoryKind};
use crate::error::{CuResult, Error, OutOfMemory, Result};
use crate::sync::{MutexGuard, is_planted};
use crate::units::{DevicePtr, align_down};
use std::panic::{AssertUnwindSafe, catch_unwind};

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

/// How growing ended.
enum Grown {
    Done,
    /// The driver has no memory, and says it has this much.
    Refused(Option<u64>),
    Failed(Failure),
}

/// Work under way. Dropped without being settled, which a panic in the driver does, it takes back what was done.
pub(super) struct UnderWay<'a> {
    shared: &'a Shared,
    work: Option<Work>,
    parts: Vec<Run>,
}

impl<'a> UnderWay<'a> {
    pub(super) fn new(shared: &'a Shared, work: Work, parts: Vec<Run>) -> Self {
        Self { shared, work: Some(work), parts }
    }

    pub(super) fn work(&mut self) -> &mut Work {
        self.work.as_mut().expect("work is under way until it is settled")
    }

    /// Books the work and wakes whoever waits for it. Returns with the lock held, and whether any page is mapped.
    pub(super) fn settle(mut self, keep: Option<Run>) -> (MutexGuard<'a, Core>, bool) {
        let work = self.work.take().expect("work is settled once");
        self.shared.settle(work, &self.parts, keep)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if let Some(mut work) = self.work.take()
            && !is_planted("panic_not_settled")
        {
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
        if !is_planted("settled_quietly") {
            self.shared.settled.notify_all();
        }
    }
}

impl Shared {
    fn settle(&self, work: Work, parts: &[Run], keep: Option<Run>) -> (MutexGuard<'_, Core>, bool) {
        let mut core = self.core.lock();
        let mapped = core.settle(work, parts, keep);
        if !is_planted("settled_quietly") {
            self.settled.notify_all();
        }
        (core, mapped)
    }

    /// Serves a request that no free memory serves.
    ///
    /// # Errors
    /// Out of memory, or the driver's failure.
    pub(super) fn grow(&self, request: &Request) -> Result<Served> {
        Ok(self.grow_unless_displaced(request)?.expect("only a request at a place can lose it"))
    }

    /// Serves a request that no free memory serves; `None` where it was for a place, and that is not to be had as it was asked
    /// for: the caller looks again.
    ///
    /// # Errors
    /// Out of memory, or the driver's failure.
    pub(super) fn grow_unless_displaced(&self, request: &Request) -> Result<Option<Served>> {
        loop {
            let numbers = match self.grow_or_refuse(request)? {
                Ok(served) => return Ok(served),
                Err(numbers) => numbers,
            };
            // No lock is held: the callback may use the pool. What it frees is looked at first.
            let _held = is_planted("callback_under_lock").then(|| self.core.lock());
            if !self.on_out_of_memory.as_ref().is_some_and(|callback| (callback.0)(&numbers)) {
                return Err(Error::out_of_memory(numbers));
            }
        }
    }

    fn grow_or_refuse(&self, request: &Request) -> Result<Result<Option<Served>, OutOfMemory>> {
        let mut attempt = Attempt {
            // A wish beyond all memory is a wish for all of it.
            step_bytes: self.options.growth.min(self.memory_bytes),
            driver_room: None,
            code: None,
            driver_free: None,
            handles: Handles::Many,
            no_addresses: !self.site.maps_pages,
            misplaced: false,
            contested: false,
            progress: 0,
            stuck_tried: false,
        };
        let mut core = self.core.lock();
        attempt.progress = core.progress;
        if core.few_handles {
            attempt.handles = Handles::Few;
        }
        loop {
            if let Some(served) = core.serve(request) {
                return Ok(Ok(Some(served)));
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
                        Grown::Done => {
                            core.few_handles = attempt.handles != Handles::Many;
                            let served = core.accept(run, request);
                            drop(core);
                            if let Some(served) = served
                                && is_planted("window_before_access")
                            {
                                self.set_access_too_late(served.address, u64::from(run.len) * GRAIN_BYTES);
                            }
                            return Ok(Ok(served));
                        }
                        Grown::Refused(free) => self.learn(&mut core, &mut attempt, &asked, free),
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
                        Grown::Refused(free) => self.learn(&mut core, &mut attempt, &asked, free),
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
                    reserving.done = self.reserve_addresses(request.shape)?;
                    attempt.no_addresses = !reserving.done;
                    attempt.progress += u64::from(reserving.done);
                    drop(reserving);
                    core = self.core.lock();
                }
                Step::Wait => core = self.settled.wait(core),
                Step::Displaced => return Ok(Ok(None)),
                Step::Refuse => {
                    // A slab needs several grains in a row; the request itself may need one.
                    return Ok(core
                        .serve(&request.without_slab())
                        .map(Some)
                        .ok_or_else(|| core.out_of_memory(request, attempt.code, attempt.driver_free)));
                }
            }
        }
    }

    /// Calls the driver for work that takes memory. Where it refuses, it is asked what it has left while the work still
    /// counts as under way.
    fn call_to_grow(&self, work: &mut Work, asked: &Asked) -> Grown {
        let mut outcome = work.grow();
        if (cfg!(vrampool_fault = "late_charge") || is_planted("late_charge")) && outcome.is_ok() {
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
    fn learn(&self, core: &mut Core, attempt: &mut Attempt, asked: &Asked, free: Option<u64>) {
        attempt.code = Some(CuResult::ERROR_OUT_OF_MEMORY);
        if asked.beyond {
            attempt.step_bytes /= 2;
            return;
        }
        attempt.contested = asked.alone_since != Some(core.begun) && !is_planted("contest_not_noticed");
        if attempt.contested {
            return;
        }
        attempt.driver_free = free;
        let lacks_handles = self.site.maps_pages && free.is_some_and(|free| free >= asked.bytes);
        match attempt.handles {
            Handles::Many if lacks_handles && asked.handles > 1 => attempt.handles = Handles::Few,
            Handles::Many | Handles::Few if lacks_handles => attempt.handles = Handles::Last,
            _ => {
                // Where the driver does not say, all that is known is that it has less than this.
                attempt.driver_room = Some(free.unwrap_or(asked.bytes).min(asked.bytes - self.site.page_bytes));
                core.refused_at = Some(core.buddy.arena.held_bytes());
            }
        }
    }

    /// The bytes that the driver has left, by its own word; `None` for memory of the host, of which it says nothing.
    fn driver_free(&self) -> Option<u64> {
        let info = (self.site.kind == MemoryKind::Device).then(|| self.site.driver.memory_info(self.site.device));
        info?.ok().map(|info| info.free_bytes)
    }

    /// The planted fault of pages that go to others before access to them is set.
    fn set_access_too_late(&self, address: DevicePtr, bytes: u64) {
        let start = align_down(address.address(), self.site.page_bytes);
        let bytes = (address.address() + bytes).next_multiple_of(self.site.page_bytes) - start;
        let access = [AccessDescriptor { device: self.site.device, flags: AccessFlags::ReadWrite }];
        let _ = self.site.driver.mem_set_access(DevicePtr::new(start), bytes, &access);
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
}

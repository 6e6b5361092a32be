//! Planning: what is to be done next for a request that no free memory serves, decided under the lock.

use super::Shared;
use super::addresses::address_bytes;
use super::core::Core;
use super::in_place::Way;
use super::request::Request;
use super::trim::idle_handles;
use crate::arena::{GRAIN_BYTES, Part, Work};
use crate::buddy::{Filling, Run, Search, Window, fill};
use crate::error::CuResult;
use crate::sync::is_planted;
use crate::units::{MIB, align_down};

/// The largest handle, in bytes.
const MAX_HANDLE_BYTES: u64 = 32 * MIB;
/// A new handle is at most one part in so many of the request it is made for, of the pool's budget, and of what may still be
/// taken. Making and mapping cost per handle; but only a handle that is wholly free can be moved or given back.
const HANDLES_PER_REQUEST: u64 = 8;
const HANDLES_PER_BUDGET: u64 = 64;
const HANDLES_PER_ROOM: u64 = 64;
/// Where nothing limits the pool, the least size doubles with so many handles held: drivers are known that refuse after a
/// thousand of them.
const HANDLES_PER_DOUBLING: usize = 384;

/// How many handles to ask for, by what the driver's refusals say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Handles {
    /// As many as are handy.
    Many,
    /// As few as possible: it refused while it had memory.
    Few,
    /// As few as possible, once those that are idle have gone: it refused even these.
    Last,
}

/// What one request has learnt on its way.
#[derive(Debug)]
pub(super) struct Attempt {
    /// How much to map at once, in bytes: a wish beyond the need, halved at each refusal.
    pub(super) step_bytes: u64,
    /// What the driver seems to have left, in bytes, once it has refused.
    pub(super) driver_room: Option<u64>,
    /// The code with which it refused.
    pub(super) code: Option<CuResult>,
    /// What it said it had free when it last refused, in bytes.
    pub(super) driver_free: Option<u64>,
    pub(super) handles: Handles,
    /// Whether no addresses can be reserved, so that only plain allocations are left.
    pub(super) no_addresses: bool,
    /// Whether a plain allocation came at an address that could not be used, and another one would fare no better.
    pub(super) misplaced: bool,
    /// Whether the driver refused while other work was under way: the next attempt waits until there is none.
    pub(super) contested: bool,
    /// The core's count of progress that this attempt knows of. More than that is others' doing: what the driver has left
    /// may have changed, in memory and in addresses.
    pub(super) progress: u64,
    /// Whether the driver was asked once more to take back what it would not take before.
    pub(super) stuck_tried: bool,
}

/// The next thing to do for a request.
pub(super) enum Step {
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
    /// Give up, as the place that was asked for is not to be had.
    Displaced,
    /// Give up.
    Refuse,
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

impl Shared {
    /// Plans one step for a request that nothing free serves. Under the lock.
    pub(super) fn plan(&self, core: &mut Core, request: &Request, attempt: &Attempt) -> Step {
        if attempt.contested && core.works > 0 {
            return Step::Wait;
        }
        match core.way_of(request) {
            Way::Open => {}
            Way::InMotion => return Step::Wait,
            Way::Closed => return Step::Displaced,
        }
        let own_room = match core.capacity {
            Some(_) if cfg!(vrampool_fault = "late_charge") || is_planted("late_charge") => u64::MAX,
            Some(capacity) => capacity.saturating_sub(core.buddy.arena.held_bytes()),
            None => u64::MAX,
        };
        let room = own_room.min(attempt.driver_room.unwrap_or(u64::MAX));
        let shape = request.shape;
        if self.site.maps_pages {
            if attempt.handles == Handles::Last {
                let (idle, bytes) = idle_handles(core, None, u64::MAX);
                if bytes > 0 {
                    return Step::Release { work: core.begin_release(&idle) };
                }
            }
            // Fast where there is memory: the best of a few windows, and within the budget.
            let (budget, wish) = core.budget(shape.grains);
            let search = if core.is_scarce() { Search::Thrifty } else { Search::Quick };
            let room = Room { hard: room, soft: room.min(wish.max(attempt.step_bytes)), budget };
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
            if shape.at.is_none() && !attempt.no_addresses && missing && pages_bytes <= room.hard.saturating_add(idle) {
                // Another thread's addresses may do for this one, too.
                return if core.reserving { Step::Wait } else { Step::Reserve };
            }
        }
        if shape.at.is_none() && attempt.no_addresses {
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
        if core.works > 0 && !is_planted("refuse_without_waiting") { Step::Wait } else { Step::Refuse }
    }

    fn bytes_of(&self, window: &Window) -> u64 {
        u64::from(window.missing_pages) * self.site.page_bytes
    }

    /// How a window comes by its missing pages: from the driver as far as the budget goes, from idle handles, and from the
    /// driver again. `None` where all that is too little.
    fn fill(&self, core: &mut Core, window: &Window, attempt: &Attempt, room: Room) -> Option<Step> {
        let page_bytes = self.site.page_bytes;
        let needed = self.bytes_of(window);
        if window.one_handle {
            return self.fill_with_one_handle(core, window, room.hard);
        }
        let handle_pages = self.handle_pages(window, attempt, room, core.buddy.arena.handle_count());
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
        let pages_of = |bytes: u64| u32::try_from(bytes / page_bytes).unwrap_or(u32::MAX);
        let filling = fill(&window.missing, &idle, pages_of(room.soft), handle_pages);
        let short_of = |most: u64| filling.new_pages.saturating_sub(pages_of(most));
        if short_of(room.soft) == 0 {
            return Some(self.map(core, window, &filling));
        }
        // Handles that fit in no gap go, and smaller ones are made in their place.
        for short in [short_of(room.soft), short_of(room.hard)] {
            let (mut chosen, mut pages) = (Vec::new(), 0);
            for idle in &filling.too_large {
                if pages >= short {
                    break;
                }
                chosen.push(idle.handle);
                pages += idle.pages.count;
            }
            if pages >= short && short > 0 {
                return Some(Step::Release { work: core.begin_release(&chosen) });
            }
        }
        // Where too few are idle, the budget is overdrawn; under a limit without moving anything, since then, as measured,
        // more whole pages are left when it is reached.
        if needed <= room.hard && room.hard < u64::MAX {
            return Some(self.map(core, window, &fill(&window.missing, &[], u32::MAX, handle_pages)));
        }
        (short_of(room.hard) == 0).then(|| self.map(core, window, &filling))
    }

    /// One new handle for a window, once idle handles have made room for it; `None` where they cannot.
    fn fill_with_one_handle(&self, core: &mut Core, window: &Window, room: u64) -> Option<Step> {
        let needed = self.bytes_of(window);
        if needed > room {
            return self.make_room(core, Some(window), needed - room).map(|work| Step::Release { work });
        }
        let parts = window.missing.iter().copied().map(Part::New).collect();
        let filling = Filling { parts, new_pages: window.missing_pages, too_large: Vec::new() };
        Some(self.map(core, window, &filling))
    }

    /// The most pages that a new handle under a window is to have, where `handles` are held.
    fn handle_pages(&self, window: &Window, attempt: &Attempt, room: Room, handles: usize) -> u32 {
        if attempt.handles != Handles::Many {
            return 1 << 30;
        }
        let least = if room.hard < u64::MAX { 0 } else { self.site.page_bytes << (handles / HANDLES_PER_DOUBLING).min(8) };
        let bytes = [
            MAX_HANDLE_BYTES,
            (u64::from(window.run.len) * GRAIN_BYTES / HANDLES_PER_REQUEST).max(least),
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
}

//! Memory going back to the driver.

use super::Shared;
use super::core::Core;
use super::grow::UnderWay;
use crate::arena::Work;
use crate::buddy::Window;
use crate::error::{Error, Result};
use crate::sync::{MutexGuard, is_planted};
use std::panic::{AssertUnwindSafe, catch_unwind};

impl Shared {
    /// Gives idle handles back until at most `to` bytes are held, or none is left. What is held then, in bytes.
    ///
    /// # Errors
    /// The driver's failure.
    pub(super) fn trim(&self, to: u64) -> Result<u64> {
        if self.has_ended() {
            return Ok(0);
        }
        let core = self.give_back_while(self.core.lock(), |core| core.kept_bytes().saturating_sub(to))?;
        Ok(core.buddy.arena.held_bytes())
    }

    /// Sets the most bytes that may be held, and gives idle handles back until no more are, or none is left. What is held
    /// then, in bytes.
    ///
    /// # Errors
    /// The driver's failure.
    pub(super) fn set_capacity(&self, capacity: Option<u64>) -> Result<u64> {
        if self.has_ended() {
            return Ok(0);
        }
        let mut core = self.core.lock();
        core.set_capacity(capacity);
        let core = self.give_back_while(core, Core::excess_bytes)?;
        Ok(core.buddy.arena.held_bytes())
    }

    /// Gives idle handles back until the limits hold, or none is left.
    ///
    /// # Errors
    /// The driver's failure.
    pub(super) fn come_down(&self) -> Result<()> {
        if self.has_ended() {
            return Ok(());
        }
        self.give_back_while(self.core.lock(), Core::excess_bytes).map(drop)
    }

    /// Gives idle handles of `bytes` bytes back, or all there are, and what the driver would not take before.
    ///
    /// # Errors
    /// The driver's failure.
    pub(super) fn give_back_idle(&self, bytes: u64) -> Result<()> {
        if self.has_ended() {
            return Ok(());
        }
        let mut core = self.core.lock();
        let (chosen, _) = idle_handles(&core, None, bytes);
        if chosen.is_empty() && !core.buddy.arena.has_stuck_pieces() {
            return Ok(());
        }
        let work = core.begin_release(&chosen);
        self.give_back(core, work).map(drop)
    }

    /// Gives back what is held beyond the limits, after a span was freed or work was done: after a limit was lowered,
    /// what is freed goes. Nobody has asked for that, so nobody is told of a failure, and what the driver would not take is tried again.
    pub(super) fn give_back_excess(&self, core: MutexGuard<'_, Core>) {
        if core.excess_bytes() > 0 {
            // This may run where a block is dropped, and the driver's panic is no news of the block.
            let _ = catch_unwind(AssertUnwindSafe(|| self.give_back_while(core, Core::excess_bytes).map(drop)));
        }
    }

    /// Gives idle handles back while there is an `excess`, in bytes, and any is left.
    ///
    /// # Errors
    /// The driver's failure.
    fn give_back_while<'a>(&'a self, mut core: MutexGuard<'a, Core>, excess: impl Fn(&Core) -> u64) -> Result<MutexGuard<'a, Core>> {
        loop {
            let bytes = excess(&core);
            if bytes == 0 {
                return Ok(core);
            }
            let (chosen, _) = idle_handles(&core, None, bytes);
            if chosen.is_empty() && !core.buddy.arena.has_stuck_pieces() {
                return Ok(core);
            }
            if is_planted("handle_chosen_outside_lock") {
                drop(core);
                core = self.core.lock();
            }
            let work = core.begin_release(&chosen);
            core = self.give_back(core, work)?;
        }
    }

    /// Gives handles back without the lock.
    ///
    /// # Errors
    /// The driver's failure; the work is settled all the same.
    pub(super) fn give_back<'a>(&'a self, core: MutexGuard<'a, Core>, work: Work) -> Result<MutexGuard<'a, Core>> {
        drop(core);
        let mut under_way = UnderWay::new(self, work, Vec::new());
        let outcome = under_way.work().release();
        let (core, _) = under_way.settle(None);
        outcome.map_err(|failure| Error::driver(failure.call.name(), failure.code))?;
        Ok(core)
    }
}

/// Idle handles, highest address first, as many as come to `bytes` bytes, or all that there are; and their bytes. None lies
/// under `spare`.
pub(super) fn idle_handles(core: &Core, spare: Option<&Window>, bytes: u64) -> (Vec<u32>, u64) {
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

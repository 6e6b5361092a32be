//! Memory going back to the driver.

use super::Shared;
use super::core::Core;
use super::grow::UnderWay;
use crate::arena::Work;
use crate::buddy::Window;
use crate::error::{Error, Result};
use crate::sync::{MutexGuard, is_planted};

impl Shared {
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

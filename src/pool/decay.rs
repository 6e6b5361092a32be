//! Decay: memory that was not needed for a while goes back to the driver.
//!
//! Time is cut into periods. At the end of one, what is held beyond `(1 + slack) x` the most that was in use during it is
//! given back, as far as it is wholly free. So a pool keeps what its program needs again and again, however often it is freed
//! in between, and gives back a peak that has passed within two periods.
//!
//! No thread waits for the end of a period: the pool's own calls look at the clock, and [`Pool::decay`](super::Pool::decay) does
//! for a program that makes none. jemalloc's decay and mimalloc's delayed purge are driven in the same way.

use super::Shared;
use super::core::Core;
use crate::arena::GRAIN_BYTES;
use crate::error::Result;
use crate::sync::Arc;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// In a second.
const NANOSECONDS: u128 = 1_000_000_000;

/// What time it is.
#[derive(Clone)]
pub(super) struct Clock(pub(super) Arc<dyn Fn() -> Duration + Send + Sync>);

impl Clock {
    /// Time since now.
    pub(super) fn monotonic() -> Self {
        let start = Instant::now();
        Self(Arc::new(move || start.elapsed()))
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

/// The running period of a pool, by its clock.
#[derive(Clone, Debug)]
pub(super) struct Decay {
    period: Duration,
    ends: Duration,
    /// The most grains in use during the running period, as far as it is known.
    peak: u64,
    /// The same since the clock was last looked at.
    peak_since_look: u64,
}

impl Decay {
    pub(super) fn new(period: Duration, now: Duration) -> Self {
        Self { period, ends: now.saturating_add(period), peak: 0, peak_since_look: 0 }
    }

    /// Notes that grains were allocated, and that `taken` are in use now.
    pub(super) fn note_taken(&mut self, taken: u64) {
        self.peak = self.peak.max(taken);
        self.peak_since_look = self.peak_since_look.max(taken);
    }

    /// Looks at the clock, with `taken` grains in use. The peak of the last full period, in grains, where one has ended.
    fn look(&mut self, now: Duration, taken: u64) -> Option<u64> {
        let before = std::mem::replace(&mut self.peak_since_look, taken);
        let late = now.checked_sub(self.ends)?;
        // Whole periods in which nobody looked: what was in use is what was in use at the last look, or since.
        let ended = if late < self.period { self.peak } else { before };
        let into_the_running = late.as_nanos() % self.period.as_nanos();
        let into_the_running = Duration::new((into_the_running / NANOSECONDS) as u64, (into_the_running % NANOSECONDS) as u32);
        self.ends = (now - into_the_running).saturating_add(self.period);
        self.peak = before;
        Some(ended)
    }
}

impl Core {
    /// The most bytes to hold from now on, where a period has ended.
    fn bytes_to_keep(&mut self, now: Duration, slack: f64) -> Option<u64> {
        let taken = self.buddy.taken_grains();
        let peak = self.decay.as_mut()?.look(now, taken)?;
        // Saturates where it is beyond all memory.
        Some(((1.0 + slack) * (peak * GRAIN_BYTES) as f64) as u64)
    }

    /// Idle handles of at most `bytes` bytes together.
    fn idle_handles_within(&self, mut bytes: u64) -> Vec<u32> {
        let mut chosen = Vec::new();
        for idle in self.buddy.idle_handles(None) {
            if idle.bytes <= bytes {
                chosen.push(idle.handle);
                bytes -= idle.bytes;
            }
        }
        chosen
    }
}

impl Shared {
    /// Looks at the clock, and gives back what a period that has ended did not need. Bytes held then.
    ///
    /// # Errors
    /// The driver's failure.
    pub(super) fn decay(&self) -> Result<u64> {
        if self.has_ended() {
            return Ok(0);
        }
        // The clock is the program's, and may use the pool.
        let now = self.clock.as_ref().map(|clock| (clock.0)());
        let mut core = self.core.lock();
        if let Some(now) = now
            && let Some(keep) = core.bytes_to_keep(now, self.options.slack)
        {
            let chosen = core.idle_handles_within(core.kept_bytes().saturating_sub(keep));
            if !chosen.is_empty() {
                let work = core.begin_release(&chosen);
                core = self.give_back(core, work)?;
            }
        }
        Ok(core.buddy.arena.held_bytes())
    }

    /// The same on the way of an allocation or a free of a span, which is served whatever comes of it.
    pub(super) fn decay_by_the_way(&self) {
        if self.clock.is_some() {
            let _ = catch_unwind(AssertUnwindSafe(|| self.decay()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_peak_of_the_last_full_period_is_told_when_it_has_ended() {
        let mut decay = Decay::new(at(10), at(3));
        decay.note_taken(7);
        assert_eq!(decay.look(at(12), 5), None);
        decay.note_taken(6);
        assert_eq!(decay.look(at(13), 4), Some(7), "the first period is from 3 to 13");
        assert_eq!(decay.look(at(13), 4), None, "once");
        assert_eq!(decay.look(at(22), 1), None);
        assert_eq!(decay.look(at(23), 1), Some(6), "of what was in use when it began it knows no better");
        // Three periods with nobody there: what was in use in the last of them was in use at the last look.
        assert_eq!(decay.look(at(57), 0), Some(1));
        assert_eq!(decay.look(at(62), 0), None, "the periods stay where they are");
        assert_eq!(decay.look(at(63), 0), Some(1), "freed in the period that has just ended");
        assert_eq!(decay.look(at(73), 0), Some(0));
        // A clock that goes back, or jumps to its end, is no harm.
        assert_eq!(decay.look(at(1), 0), None);
        decay.note_taken(9);
        assert_eq!(decay.look(Duration::MAX, 9), Some(9));
        assert_eq!(decay.look(Duration::MAX, 9), Some(9));
    }
}

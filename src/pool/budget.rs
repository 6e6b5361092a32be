//! How much memory a pool takes from the driver before it moves what it has.

use crate::arena::GRAIN_BYTES;

/// A stretch of allocations ends when this many times its peak was allocated.
const TURNOVER: u64 = 16;

/// How much the budget grows for a byte that was moved.
const MOVED: f64 = 0.1;

/// What one stretch of allocations has seen.
#[derive(Clone, Copy, Debug, Default)]
struct Stretch {
    /// The most grains that were in use.
    peak: u64,
    /// Grains allocated.
    allocated: u64,
    /// Bytes that were moved.
    moved: u64,
}

/// The budget: `(1 + slack) x peak + 0.1 x moved`.
///
/// *Peak* is the most that was in use and *moved* the bytes of handles that were moved, of late: in this stretch of
/// allocations and the one before. Moving costs time and memory costs memory, so a pool that moves often is allowed more.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    slack: f64,
    now: Stretch,
    before: Stretch,
}

impl Budget {
    pub(super) fn new(slack: f64) -> Self {
        Self { slack, now: Stretch::default(), before: Stretch::default() }
    }

    /// Notes that `grains` were allocated, and that `taken` are in use now.
    pub(super) fn note_taken(&mut self, grains: u32, taken: u64) {
        self.now.peak = self.now.peak.max(taken);
        self.now.allocated += u64::from(grains);
        if self.now.allocated > TURNOVER * self.now.peak {
            self.before = std::mem::take(&mut self.now);
            self.now.peak = taken;
        }
    }

    pub(super) fn note_moved(&mut self, bytes: u64) {
        self.now.moved += bytes;
    }

    /// The most bytes to hold for `taken` grains in use.
    pub(super) fn bytes(&self, taken: u64) -> u64 {
        let peak = (self.now.peak.max(self.before.peak).max(taken) * GRAIN_BYTES) as f64;
        let moved = (self.now.moved + self.before.moved) as f64;
        // Saturates where it is beyond all memory.
        ((1.0 + self.slack) * peak + MOVED * moved) as u64
    }
}

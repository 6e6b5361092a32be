//! How much memory a pool takes from the driver before it moves what it has.

use crate::arena::GRAIN_BYTES;

/// A stretch of allocations ends when this many times its peak was allocated.
const TURNOVER: u64 = 64;

/// How many handles may be moved for a peak's worth of memory.
const MOVES_PER_PEAK: u64 = 5000;

/// How many allocations pay for the move of one handle.
const ALLOCATIONS_PER_MOVE: u64 = 100;

/// What one stretch of allocations has seen, in grains.
#[derive(Clone, Copy, Debug, Default)]
struct Stretch {
    /// The most that was in use.
    peak: u64,
    allocated: u64,
}

/// The budget: `(1 + slack + debt) x peak`.
///
/// *Peak* is the most that was in use of late: in this stretch of allocations and the one before. *Debt* is what moving has
/// cost so far: a handle that is moved adds to it, whatever its size, since the driver's calls take the same time for any; an
/// allocation takes a hundredth of that away. So a pool that moves more than a handle in a hundred allocations is allowed more
/// memory, until it does not; and one that moved much once, comes back.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    slack: f64,
    now: Stretch,
    before: Stretch,
    /// In allocations that are to pay for it.
    debt: u64,
}

impl Budget {
    pub(super) fn new(slack: f64) -> Self {
        Self { slack, now: Stretch::default(), before: Stretch::default(), debt: 0 }
    }

    /// Notes that `grains` were allocated, and that `taken` are in use now.
    pub(super) fn note_taken(&mut self, grains: u32, taken: u64) {
        self.debt = self.debt.saturating_sub(1);
        self.now.peak = self.now.peak.max(taken);
        self.now.allocated += u64::from(grains);
        if self.now.allocated > TURNOVER * self.now.peak {
            self.before = self.now;
            self.now = Stretch { peak: taken, allocated: 0 };
        }
    }

    /// Notes that handles were moved.
    pub(super) fn note_moved(&mut self, handles: u64) {
        self.debt = self.debt.saturating_add(handles * ALLOCATIONS_PER_MOVE);
    }

    /// The most bytes to hold for `taken` grains in use.
    pub(super) fn bytes(&self, taken: u64) -> u64 {
        let peak = (self.now.peak.max(self.before.peak).max(taken) * GRAIN_BYTES) as f64;
        let debt = self.debt as f64 / (MOVES_PER_PEAK * ALLOCATIONS_PER_MOVE) as f64;
        // Saturates where it is beyond all memory.
        ((1.0 + self.slack + debt) * peak) as u64
    }
}

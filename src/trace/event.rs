//! What a trace is made of.

use std::fmt;

/// What an event of a trace does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// A block was allocated.
    Allocate,
    /// A block was freed.
    Free,
    /// From here on the block is used on the event's stream too.
    Use,
    /// An allocation that failed when the trace was recorded.
    AllocateFailure,
}

impl Action {
    /// The action as the log spells it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allocate => "allocate",
            Self::Free => "free",
            Self::Use => "use",
            Self::AllocateFailure => "allocate failure",
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One row of a trace, in 40 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    pub(super) size: u64,
    pub(super) time_ns: u64,
    pub(super) block: u32,
    pub(super) thread: u32,
    pub(super) stream: u32,
    pub(super) line: u32,
    pub(super) action: Action,
}

impl Event {
    /// The block number of an event that names no block.
    pub(super) const NO_BLOCK: u32 = u32::MAX;

    /// What happened.
    #[must_use]
    pub const fn action(&self) -> Action {
        self.action
    }

    /// The block's size as it was asked for, in bytes. For a free or a use it is the size of the allocation, whatever
    /// the row itself says; for one that names no block it is what the row says.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// The block's number, below [`Trace::blocks`]. A number is given again once its block is freed, so that a table
    /// of the live blocks is as short as can be. `None` for a recorded failure, and for a free or a use of the null
    /// address that no allocation returned.
    #[must_use]
    pub const fn block(&self) -> Option<usize> {
        if self.block == Self::NO_BLOCK { None } else { Some(self.block as usize) }
    }

    /// The index in [`Trace::threads`] of the thread that made the call.
    #[must_use]
    pub const fn thread(&self) -> usize {
        self.thread as usize
    }

    /// The index in [`Trace::streams`] of the stream that the call named.
    #[must_use]
    pub const fn stream(&self) -> usize {
        self.stream as usize
    }

    /// When it happened, in nanoseconds since an origin of the trace's own. Never less than the event before.
    #[must_use]
    pub const fn time_ns(&self) -> u64 {
        self.time_ns
    }

    /// The line of the file, counted from one.
    #[must_use]
    pub const fn line(&self) -> usize {
        self.line as usize
    }
}

/// A recorded sequence of allocations and frees.
///
/// It is consistent by construction: a block is allocated, used while it lives, and freed once at most. What is live at
/// the end stays live; programs exit without freeing everything.
#[derive(Clone, PartialEq, Eq)]
pub struct Trace {
    pub(super) name: String,
    pub(super) events: Vec<Event>,
    pub(super) threads: Vec<u64>,
    pub(super) streams: Vec<u64>,
    pub(super) blocks: usize,
    pub(super) allocations: usize,
    pub(super) recorded_failures: usize,
    pub(super) peak_live_bytes: u64,
}

impl Trace {
    /// What the trace was called when it was read: a path, for a file.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The events in the order of the file, which is an order in which they can have happened.
    #[must_use]
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// The threads in the order of their first event, by the number that the file gives them.
    #[must_use]
    pub fn threads(&self) -> &[u64] {
        &self.threads
    }

    /// The streams in the order of their first event, by their handle. The default stream is 0.
    #[must_use]
    pub fn streams(&self) -> &[u64] {
        &self.streams
    }

    /// The most blocks that were live at once, and so the numbers that [`Event::block`] gives.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// How many events allocate, recorded failures not among them.
    #[must_use]
    pub fn allocations(&self) -> usize {
        self.allocations
    }

    /// How many allocations failed when the trace was recorded.
    #[must_use]
    pub fn recorded_failures(&self) -> usize {
        self.recorded_failures
    }

    /// The most bytes that were live at once, as they were asked for. A sum beyond 64 bits reads `u64::MAX`.
    #[must_use]
    pub fn peak_live_bytes(&self) -> u64 {
        self.peak_live_bytes
    }

    /// The time between the first event and the last, in nanoseconds.
    #[must_use]
    pub fn duration_ns(&self) -> u64 {
        match (self.events.first(), self.events.last()) {
            (Some(first), Some(last)) => last.time_ns - first.time_ns,
            _ => 0,
        }
    }

    /// Checks by a walk of its own what a trace promises.
    ///
    /// # Panics
    /// When a promise is broken: a fault of the reader.
    #[cfg(any(test, feature = "testing"))]
    pub fn check(&self) {
        let mut live: Vec<Option<u64>> = vec![None; self.blocks];
        let (mut live_bytes, mut peak, mut live_blocks, mut most_blocks) = (0u128, 0u128, 0, 0);
        let (mut allocations, mut failures, mut time, mut line) = (0, 0, 0, 0);
        for event in &self.events {
            assert!(event.thread() < self.threads.len() && event.stream() < self.streams.len(), "{event:?} is in the tables");
            assert!(event.time_ns >= time && event.line > line, "{event:?} is not before the one before");
            (time, line) = (event.time_ns, event.line);
            match (event.action, event.block()) {
                (Action::Allocate, Some(block)) => {
                    assert_eq!(live[block].replace(event.size), None, "{event:?} takes a number that is not taken");
                    live_bytes += u128::from(event.size);
                    peak = peak.max(live_bytes);
                    live_blocks += 1;
                    most_blocks = most_blocks.max(live_blocks);
                    allocations += 1;
                }
                (Action::Free, Some(block)) => {
                    assert_eq!(live[block].take(), Some(event.size), "{event:?} frees a live block");
                    live_bytes -= u128::from(event.size);
                    live_blocks -= 1;
                }
                (Action::Use, Some(block)) => assert_eq!(live[block], Some(event.size), "{event:?} uses a live block"),
                (Action::AllocateFailure, None) => failures += 1,
                (Action::Free | Action::Use, None) => {}
                (Action::Allocate, None) | (Action::AllocateFailure, Some(_)) => panic!("{event:?}: its block"),
            }
        }
        assert_eq!(most_blocks, self.blocks, "numbers are given again as soon as they are free");
        assert_eq!(u64::try_from(peak).unwrap_or(u64::MAX), self.peak_live_bytes);
        assert_eq!((allocations, failures), (self.allocations, self.recorded_failures));
        for table in [&self.threads, &self.streams] {
            let distinct: std::collections::HashSet<_> = table.iter().collect();
            assert_eq!(distinct.len(), table.len(), "the tables name nothing twice");
        }
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace")
            .field("name", &self.name)
            .field("events", &self.events.len())
            .field("threads", &self.threads)
            .field("streams", &self.streams)
            .field("peak_live_bytes", &self.peak_live_bytes)
            .finish_non_exhaustive()
    }
}

//! **Outside**: allocation traces — reading what a program once asked of its allocator, and asking a pool the same.
//!
//! A [`Trace`] is the order of a program's allocations and frees, with nothing of what it computed. It is read from the
//! CSV log of RMM's logging adaptor ([`Trace::open`], [`Trace::read`]; the format is described at [`Trace::read`]) and
//! fed to a pool event by event by [`replay()`], or by [`replay_verified()`], which has the device prove that no block lost
//! its bytes. [`min_capacity()`] finds how little memory a pool can do with.
//!
//! ```
//! use vrampool::trace::Trace;
//!
//! let log = "Thread,Time,Action,Pointer,Size,Stream\n\
//!            1,10:00:00:000001,allocate,0x7f0000000000,4096,0\n\
//!            1,10:00:00:000009,free,0x7f0000000000,4096,0\n";
//! let trace = Trace::read("example", log.as_bytes())?;
//! assert_eq!(trace.events().len(), 2);
//! assert_eq!(trace.peak_live_bytes(), 4096);
//! # Ok::<(), vrampool::Error>(())
//! ```

mod builder;
mod capacity;
mod event;
mod field;
mod reader;
mod replay;
#[cfg(test)]
mod tests;
mod verify;

pub use capacity::{Capacity, Fit, Trial, min_capacity};
#[cfg(any(test, feature = "testing"))]
pub use capacity::{Found, smallest};
pub use event::{Action, Event, Trace};
pub use replay::{Failure, Passes, Progress, Report, replay, replay_verified};
pub use verify::{Mismatch, Verification};

/// The fuzz target of the reader: whatever the bytes, they are refused or give a consistent trace.
///
/// # Panics
/// On a fault of the reader.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_reader(data: &[u8]) {
    if let Ok(trace) = Trace::read("fuzz", data) {
        trace.check();
    }
}

//! The synchronisation primitives that every layer uses, and the one place to switch them for a model checker: in the unit tests
//! under `--cfg vrampool_shuttle` they are the crate `shuttle`'s, and each use of one is a point at which it may go on with
//! another thread.
//!
//! Locks here do not poison. A section under a lock of this crate either leaves its data valid at every point where a
//! panic is possible or calls nothing that can panic, so a lock whose holder panicked is as good as any other.

#[cfg(all(test, vrampool_shuttle))]
use shuttle as primitives;
#[cfg(not(all(test, vrampool_shuttle)))]
use std as primitives;

use primitives::sync as locks;
use std::sync::PoisonError;

pub(crate) use primitives::sync::Arc;
pub(crate) use primitives::sync::MutexGuard;
pub(crate) use primitives::sync::atomic::{AtomicU64, Ordering};
#[cfg(feature = "sim")]
pub(crate) use primitives::thread::{ThreadId, current as current_thread};
#[cfg(feature = "sim")]
pub(crate) use primitives::thread_local;

/// A mutex without poisoning.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(locks::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(locks::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A condition variable for [`Mutex`].
#[derive(Debug, Default)]
pub(crate) struct Condvar(locks::Condvar);

impl Condvar {
    pub(crate) const fn new() -> Self {
        Self(locks::Condvar::new())
    }

    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// Whether a model has planted this fault, one that takes several threads to notice.
#[cfg(not(all(test, vrampool_shuttle)))]
pub(crate) const fn is_planted(_fault: &str) -> bool {
    false
}

#[cfg(all(test, vrampool_shuttle))]
pub(crate) use planted::{is_planted, plant};

#[cfg(all(test, vrampool_shuttle))]
mod planted {
    use std::cell::Cell;

    // All threads of a model run on the thread of its test.
    std::thread_local! {
        static PLANTED: Cell<Option<&'static str>> = const { Cell::new(None) };
    }

    pub(crate) fn is_planted(fault: &str) -> bool {
        PLANTED.get() == Some(fault)
    }

    /// Plants a fault for the models of this thread, or none.
    pub(crate) fn plant(fault: Option<&'static str>) {
        PLANTED.set(fault);
    }
}

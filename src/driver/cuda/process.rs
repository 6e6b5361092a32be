//! When the driver may not be called any more: once the process is ending, and in a child that it forked.
//!
//! The driver's library may be gone before the last buffer is dropped, and even a query was seen to crash then. A forked
//! child has the parent's handles but none of its threads, and the driver supports no call there. In both cases calls
//! are answered with [`CuResult::ERROR_DEINITIALIZED`], which is the code that the driver itself has for its end, and the
//! driver is not called.

use crate::driver::DriverResult;
use crate::error::CuResult;
use crate::sync::{AtomicU64, Ordering};
use std::sync::OnceLock;

const RUNNING: u64 = 0;
const EXITING: u64 = 1;
const FORKED: u64 = 2;

static STATE: AtomicU64 = AtomicU64::new(RUNNING);

/// Whether the driver may be called.
///
/// # Errors
/// [`CuResult::ERROR_DEINITIALIZED`] at process exit and in a forked child.
pub(super) fn running() -> DriverResult<()> {
    // Relaxed: a flag on its own, set by this thread's own fork, or while the process ends, which no thread waits for.
    if STATE.load(Ordering::Relaxed) == RUNNING { Ok(()) } else { Err(CuResult::ERROR_DEINITIALIZED) }
}

/// Whether this is a child forked after the driver was initialised.
pub(super) fn is_forked() -> bool {
    // Relaxed: as in `running`.
    STATE.load(Ordering::Relaxed) == FORKED
}

extern "C" fn exiting() {
    // A child stays one: it may exit, too. Relaxed: as in `running`.
    _ = STATE.compare_exchange(RUNNING, EXITING, Ordering::Relaxed, Ordering::Relaxed);
}

extern "C" fn forked() {
    // Relaxed: as in `running`.
    STATE.store(FORKED, Ordering::Relaxed);
}

/// Watches for the end of the process and for forks, from now on. Called after `cuInit`: handlers run in the reverse order
/// of their registration, so this one comes before the driver's.
///
/// # Errors
/// The C library's error number, where it has no memory for a handler.
pub(super) fn watch() -> Result<(), i32> {
    static WATCHED: OnceLock<Result<(), i32>> = OnceLock::new();
    *WATCHED.get_or_init(|| {
        // SAFETY: POSIX, atexit: the handler is a function of this library, takes nothing and does not unwind.
        if unsafe { libc::atexit(exiting) } != 0 {
            return Err(libc::ENOMEM);
        }
        // SAFETY: POSIX, pthread_atfork: the handler does one atomic store, which is safe in a forked child.
        match unsafe { libc::pthread_atfork(None, None, Some(forked)) } {
            0 => Ok(()),
            error => Err(error),
        }
    })
}

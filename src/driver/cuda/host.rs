//! Closures as host functions of a stream.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

type Closure = Box<dyn FnOnce() + Send>;

/// Runs the closure that `data` leads to, and drops it.
///
/// A panic goes no further: the frames above are the driver's. The panic hook has reported it.
///
/// # Safety
/// `data` is [`into_data`]'s, and is used this once.
pub(super) unsafe extern "C" fn run(data: *mut c_void) {
    // SAFETY: the caller's promise.
    let closure = unsafe { from_data(data) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(closure)) {
        // Dropping what was thrown may panic again.
        std::mem::forget(panic);
    }
}

/// A closure as the pointer that C passes along.
pub(super) fn into_data(closure: Closure) -> *mut c_void {
    Box::into_raw(Box::new(closure)).cast()
}

/// The closure again.
///
/// # Safety
/// `data` is [`into_data`]'s, and is used this once.
pub(super) unsafe fn from_data(data: *mut c_void) -> Closure {
    // SAFETY: the caller's promise: the pointer is that of a box of this type, which nobody else has.
    *unsafe { Box::from_raw(data.cast::<Closure>()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_closure_runs_once_and_is_dropped() {
        let (token, seen) = (Arc::new(()), Arc::new(std::sync::Mutex::new(0)));
        let closure = {
            let (token, seen) = (token.clone(), seen.clone());
            move || {
                assert_eq!(Arc::strong_count(&token), 2);
                *seen.lock().unwrap() += 1;
            }
        };
        // SAFETY: the data is used once.
        unsafe { run(into_data(Box::new(closure))) };
        assert_eq!((*seen.lock().unwrap(), Arc::strong_count(&token)), (1, 1));
    }

    #[test]
    fn a_panic_goes_no_further() {
        struct Loud;
        impl Drop for Loud {
            fn drop(&mut self) {
                panic!("dropped");
            }
        }
        // SAFETY: the data is used once.
        unsafe { run(into_data(Box::new(|| std::panic::panic_any(Loud)))) };
    }

    #[test]
    fn what_was_not_queued_is_dropped() {
        let token = Arc::new(());
        let inner = token.clone();
        let data = into_data(Box::new(move || drop(inner)));
        // SAFETY: the data is used once.
        drop(unsafe { from_data(data) });
        assert_eq!(Arc::strong_count(&token), 1);
    }
}

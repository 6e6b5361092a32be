//! What happens at the entry of every function: it is counted, and may be made to fail.

use crate::state::{self, Fake};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use vrampool::error::CuResult;

/// What a function comes to: nothing, as its values go through pointers, or a code.
pub(crate) type Answer = Result<(), CuResult>;

/// A pointer for a result, which C may leave null.
pub(crate) type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Writes a result.
pub(crate) fn put<T>(to: Out<'_, T>, value: T) -> Answer {
    to.ok_or(CuResult::ERROR_INVALID_VALUE)?.write(value);
    Ok(())
}

/// A function of the library.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    /// The version of CUDA that it came with.
    pub(crate) since: i32,
    pub(crate) function: Function,
    pub(crate) calls: AtomicU64,
    pub(crate) hidden: AtomicBool,
}

/// A function's address.
pub(crate) struct Function(pub(crate) *const c_void);

// SAFETY: the address of code, which every thread may read.
unsafe impl Sync for Function {}

/// When a function may be called.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    Always,
    Initialized,
}

/// Which calls fail from now on.
struct Fault {
    /// The function, or `*` for all.
    name: String,
    /// Calls to let pass; less than 0: every call fails, for good.
    remaining: i64,
    code: c_int,
}

static FAULTS: Mutex<Vec<Fault>> = Mutex::new(Vec::new());
static ANY_FAULTS: AtomicBool = AtomicBool::new(false);

/// What calls do once the process exits: 0 as before, 1 they return `CUDA_ERROR_DEINITIALIZED`, 2 they abort.
pub(crate) static AFTER_EXIT: AtomicI32 = AtomicI32::new(1);
/// Whether the process is exiting.
pub(crate) static EXITED: AtomicBool = AtomicBool::new(false);

/// Plans a failure.
pub(crate) fn plan(name: &str, k: i64, code: c_int) {
    let mut faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    faults.push(Fault { name: name.to_owned(), remaining: k, code });
    ANY_FAULTS.store(true, Ordering::SeqCst);
}

/// Takes all planned failures back, and says how many had not struck.
pub(crate) fn clear_plans() -> usize {
    let mut faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    ANY_FAULTS.store(false, Ordering::SeqCst);
    std::mem::take(&mut *faults).len()
}

fn due(name: &str) -> Option<c_int> {
    if !ANY_FAULTS.load(Ordering::SeqCst) {
        return None;
    }
    let mut faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut code = None;
    faults.retain_mut(|fault| {
        if code.is_some() || (fault.name != "*" && fault.name != name) {
            return true;
        }
        if fault.remaining <= 0 {
            code = Some(fault.code);
            return fault.remaining < 0;
        }
        fault.remaining -= 1;
        true
    });
    code
}

/// A call of a function.
pub(crate) fn call(entry: &'static Entry, rule: Rule, work: impl FnOnce(&'static Fake) -> Answer) -> c_int {
    entry.calls.fetch_add(1, Ordering::SeqCst);
    if EXITED.load(Ordering::SeqCst) {
        match AFTER_EXIT.load(Ordering::SeqCst) {
            1 => return CuResult::ERROR_DEINITIALIZED.0,
            2 => {
                eprintln!("fake libcuda: {} was called after the driver had gone", entry.name);
                std::process::abort();
            }
            _ => {}
        }
    }
    // The driver does not survive a fork. No lock is taken before this: another thread may have held it at the fork.
    if state::is_forked_child() {
        return CuResult::ERROR_NOT_INITIALIZED.0;
    }
    let fake = state::fake();
    if fake.profile.stub {
        return CuResult::ERROR_STUB_LIBRARY.0;
    }
    if let Some(code) = due(entry.name) {
        return code;
    }
    if rule == Rule::Initialized && !state::is_initialized() {
        return CuResult::ERROR_NOT_INITIALIZED.0;
    }
    work(fake).map_or_else(|code| code.0, |()| CuResult::SUCCESS.0)
}

/// Exports functions: `since always name(arguments) |fake| body`, or `init` for those that need `cuInit` before.
macro_rules! exports {
    ($(
        $(#[$attribute:meta])*
        $since:literal $rule:ident $name:ident($($argument:ident: $type:ty),* $(,)?) |$fake:pat_param| $body:block
    )*) => {
        #[allow(non_upper_case_globals)]
        mod entries {
            use crate::entry::{Entry, Function};
            use std::sync::atomic::{AtomicBool, AtomicU64};
            $(
                pub(crate) static $name: Entry = Entry {
                    name: stringify!($name),
                    since: $since,
                    function: Function(super::$name as *const std::ffi::c_void),
                    calls: AtomicU64::new(0),
                    hidden: AtomicBool::new(false),
                };
            )*
        }

        /// The functions of this file.
        pub(crate) static ENTRIES: &[&crate::entry::Entry] = &[$(&entries::$name),*];

        $(
            $(#[$attribute])*
            pub(crate) extern "C" fn $name($($argument: $type),*) -> std::ffi::c_int {
                crate::entry::call(&entries::$name, $crate::entry::exports!(@rule $rule), |$fake| $body)
            }
        )*
    };
    (@rule always) => { crate::entry::Rule::Always };
    (@rule init) => { crate::entry::Rule::Initialized };
}
pub(crate) use exports;

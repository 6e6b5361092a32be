//! The library's own functions, by which a test sets the machine up and asks what was done to it. They are not counted
//! as calls, and take and return C's types.

use crate::entry::{AFTER_EXIT, clear_plans, plan};
use crate::lookup::{entries, entry};
use crate::state::{configure, context_of, fake, with_stack};
use std::ffi::{CStr, c_char, c_int};
use std::fmt::Write;
use std::sync::atomic::Ordering;
use vrampool::driver::StreamHandle;
use vrampool::error::CuResult;
use vrampool::units::DeviceId;

/// The text behind a pointer; empty for null or what is not UTF-8.
fn text<'a>(pointer: *const c_char) -> &'a str {
    if pointer.is_null() {
        return "";
    }
    // SAFETY: tests pass text that a zero byte ends and that outlives the call.
    unsafe { CStr::from_ptr(pointer) }.to_str().unwrap_or_default()
}

/// Writes as much of a text as fits, and a zero byte; returns the bytes that the whole of it has.
fn give(text: &str, buffer: *mut c_char, capacity: usize) -> usize {
    if !buffer.is_null() && capacity > 0 {
        let kept = text.len().min(capacity - 1);
        // SAFETY: tests pass a buffer of `capacity` bytes, of their own; with the zero byte no more are written.
        unsafe {
            buffer.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), kept);
            buffer.add(kept).write(0);
        }
    }
    text.len()
}

/// Sets the [profile](crate::profile) of the machine. Returns 0, or 1 and a word on stderr where it makes no sense or the
/// machine is made already.
#[unsafe(no_mangle)]
pub extern "C" fn fake_configure(profile: *const c_char) -> c_int {
    let configured = configure(text(profile));
    if let Err(error) = &configured {
        eprintln!("fake libcuda: {error}");
    }
    configured.is_err().into()
}

/// Has the `k`-th call of a function from now on (0: the next) return `code` and do nothing; for a `k` below 0, every
/// call. The name `*` is every function. Returns 0, or 1 for a name that there is no function of.
#[unsafe(no_mangle)]
pub extern "C" fn fake_fail(name: *const c_char, k: i64, code: c_int) -> c_int {
    let name = text(name);
    if name != "*" && entry(name).is_none() {
        return 1;
    }
    plan(name, k, code);
    0
}

/// Takes back the failures that were planned. Returns how many had not struck or strike for good.
#[unsafe(no_mangle)]
pub extern "C" fn fake_fail_clear() -> usize {
    clear_plans()
}

/// Has `cuGetProcAddress` not find a function, or find it again. What a program links with or finds by `dlsym` is there
/// all the same. Returns 0, or 1 for a name that there is no function of.
#[unsafe(no_mangle)]
pub extern "C" fn fake_hide(name: *const c_char, hidden: c_int) -> c_int {
    let Some(entry) = entry(text(name)) else { return 1 };
    entry.hidden.store(hidden != 0, Ordering::SeqCst);
    0
}

/// How often a function was called in this process, or, for `*`, all of them. A child of a fork begins with its
/// parent's count.
#[unsafe(no_mangle)]
pub extern "C" fn fake_calls(name: *const c_char) -> u64 {
    let name = text(name);
    entries().filter(|entry| name == "*" || entry.name == name).map(|entry| entry.calls.load(Ordering::SeqCst)).sum()
}

/// Every function, a line each: its name and the version of CUDA that it came with. Returns the text's length.
#[unsafe(no_mangle)]
pub extern "C" fn fake_symbols(buffer: *mut c_char, capacity: usize) -> usize {
    let mut lines = String::new();
    for entry in entries() {
        _ = writeln!(lines, "{} {}", entry.name, entry.since);
    }
    give(&lines, buffer, capacity)
}

/// What was taken and not given back, a line each, and what was left in contexts when they were destroyed. Returns the
/// text's length: 0 where nothing is.
#[unsafe(no_mangle)]
pub extern "C" fn fake_outstanding(buffer: *mut c_char, capacity: usize) -> usize {
    give(&fake().outstanding(), buffer, capacity)
}

/// The calling thread's current context, or 0.
#[unsafe(no_mangle)]
pub extern "C" fn fake_current_context() -> u64 {
    with_stack(|stack| stack.last().map_or(0, |&device| context_of(device))).unwrap_or(0)
}

/// How many contexts are on the calling thread's stack.
#[unsafe(no_mangle)]
pub extern "C" fn fake_context_depth() -> usize {
    with_stack(|stack| stack.len()).unwrap_or(0)
}

/// How often a device's primary context is retained.
#[unsafe(no_mangle)]
pub extern "C" fn fake_context_references(device: u32) -> u32 {
    fake().tables().references.get(&DeviceId(device)).copied().unwrap_or(0)
}

/// Physical bytes that are held of a device's memory.
#[unsafe(no_mangle)]
pub extern "C" fn fake_held_bytes(device: u32) -> u64 {
    fake().sim.held_bytes(DeviceId(device))
}

/// Breaks a device's context, as a failed kernel does: calls return `code` from now on.
#[unsafe(no_mangle)]
pub extern "C" fn fake_poison(device: u32, code: c_int) {
    fake().sim.poison(DeviceId(device), CuResult(code));
}

/// Stops a stream of a device: what is queued on it waits. Returns a code.
#[unsafe(no_mangle)]
pub extern "C" fn fake_stall(device: u32, stream: u64) -> c_int {
    fake().sim.stall(DeviceId(device), StreamHandle(stream)).err().map_or(0, |code| code.0)
}

/// Lets every stream go on.
#[unsafe(no_mangle)]
pub extern "C" fn fake_resume_all() {
    fake().sim.resume_all();
}

/// What calls do once the process exits, that is after the functions that were given to `atexit` later than the first
/// `cuInit`: 0 as before; 1, at first, return 4, `CUDA_ERROR_DEINITIALIZED`; 2 abort.
#[unsafe(no_mangle)]
pub extern "C" fn fake_after_exit(mode: c_int) {
    AFTER_EXIT.store(mode, Ordering::SeqCst);
}

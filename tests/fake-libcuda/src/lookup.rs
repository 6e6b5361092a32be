//! Errors by name, and functions by name.

use crate::entry::{Answer, Entry, Out, exports, put};
use crate::state::Fake;
use crate::{context, memory, streams, vmm, work};
use std::ffi::{CStr, CString, c_char, c_int, c_ulonglong, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use vrampool::error::CuResult;

/// What `cuGetProcAddress` says of a function.
const FOUND: c_int = 0;
const NOT_FOUND: c_int = 1;
const VERSION_NOT_SUFFICIENT: c_int = 2;

/// Every function of the library.
pub(crate) fn entries() -> impl Iterator<Item = &'static Entry> {
    let lists = [context::ENTRIES, memory::ENTRIES, vmm::ENTRIES, streams::ENTRIES, work::ENTRIES, ENTRIES];
    lists.into_iter().flatten().copied()
}

/// The function of exactly this name.
pub(crate) fn entry(name: &str) -> Option<&'static Entry> {
    entries().find(|entry| entry.name == name)
}

/// Names and descriptions of codes, which live as long as the library.
fn text_of(code: c_int) -> Option<&'static (CString, CString)> {
    static TEXTS: OnceLock<Vec<(c_int, (CString, CString))>> = OnceLock::new();
    let texts = TEXTS.get_or_init(|| {
        let text = |code: &CuResult| {
            let name = code.name().unwrap_or_default();
            let words = name.trim_start_matches("CUDA_ERROR_").trim_start_matches("CUDA_").to_lowercase().replace('_', " ");
            let text = |text: &str| CString::new(text).unwrap_or_default();
            (code.0, (text(name), text(&words)))
        };
        CuResult::NAMED.iter().map(text).collect()
    });
    texts.iter().find(|(known, _)| *known == code).map(|(_, text)| text)
}

fn put_text(to: Out<'_, *const c_char>, text: Option<&CString>) -> Answer {
    put(to, text.map_or(ptr::null(), |text| text.as_ptr()))?;
    text.map(drop).ok_or(CuResult::ERROR_INVALID_VALUE)
}

/// The newest function of a base name that came no later than a version.
fn find(fake: &Fake, base: &str, version: c_int) -> Result<*const c_void, c_int> {
    let is_hidden = |entry: &Entry| {
        let name = entry.name;
        let is_left_out = cfg!(feature = "reduced") && entry.since > 10_010;
        is_left_out || entry.hidden.load(Ordering::SeqCst) || fake.profile.hidden.iter().any(|hidden| hidden == name)
    };
    let known = |name: &str| entry(name).filter(|entry| entry.since <= fake.profile.sim.version && !is_hidden(entry));
    // A versioned name is no base name.
    let variants = [known(&format!("{base}_v2")), known(base).filter(|_| !base.ends_with("_v2"))];
    let mut variants = variants.into_iter().flatten().peekable();
    variants.peek().ok_or(NOT_FOUND)?;
    variants.find(|entry| entry.since <= version).map(|entry| entry.function.0).ok_or(VERSION_NOT_SUFFICIENT)
}

fn proc_address(
    fake: &Fake,
    name: *const c_char,
    function: Out<'_, *const c_void>,
    version: c_int,
    flags: c_ulonglong,
    status: Out<'_, c_int>,
) -> Answer {
    let function = function.filter(|_| !name.is_null() && flags <= 2).ok_or(CuResult::ERROR_INVALID_VALUE)?;
    // SAFETY: the caller passes a name that a zero byte ends (cuGetProcAddress).
    let found = find(fake, unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default(), version);
    function.write(found.unwrap_or(ptr::null()));
    if let Some(status) = status {
        status.write(found.err().unwrap_or(FOUND));
    }
    found.map(drop).map_err(|_| CuResult::ERROR_NOT_FOUND)
}

exports! {
    #[unsafe(no_mangle)]
    6000 always cuGetErrorName(code: c_int, text: Out<'_, *const c_char>) |_| {
        put_text(text, text_of(code).map(|(name, _)| name))
    }

    #[unsafe(no_mangle)]
    6000 always cuGetErrorString(code: c_int, text: Out<'_, *const c_char>) |_| {
        put_text(text, text_of(code).map(|(_, words)| words))
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    11030 always cuGetProcAddress(name: *const c_char, function: Out<'_, *const c_void>, version: c_int, flags: c_ulonglong) |fake| {
        proc_address(fake, name, function, version, flags, None)
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    12000 always cuGetProcAddress_v2(
        name: *const c_char,
        function: Out<'_, *const c_void>,
        version: c_int,
        flags: c_ulonglong,
        status: Out<'_, c_int>,
    ) |fake| {
        proc_address(fake, name, function, version, flags, status)
    }
}

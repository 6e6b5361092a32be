//! The driver's library: found at run time, or linked with the program.

use super::sys::Functions;
use crate::error::{Error, Result};
use std::ffi::{CStr, OsStr, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// The library to load instead of [`DEFAULT`], where the program is not linked with it.
pub(super) const VARIABLE: &str = "VRAMPOOL_LIBCUDA";

/// The driver's library by the name that the system's loader knows it by.
#[cfg(not(vrampool_cuda = "off"))]
pub(super) const DEFAULT: &str = "libcuda.so.1";

/// How the driver's functions were found.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Binding {
    /// The program is linked with the driver's library, which lies here.
    Linked(PathBuf),
    /// The library was loaded from here while the program ran.
    RunTime(PathBuf),
}

impl Binding {
    /// The library's file, as the system's loader names it.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Linked(path) | Self::RunTime(path) => path,
        }
    }
}

impl fmt::Display for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Linked(path) => write!(f, "linked: {}", path.display()),
            Self::RunTime(path) => write!(f, "run time: {}", path.display()),
        }
    }
}

/// The library that this build binds: the linked one, or the one that the environment names, or the system's.
///
/// # Errors
/// [`Error::is_unavailable`].
pub(super) fn default() -> Result<(Functions, Binding)> {
    match () {
        #[cfg(vrampool_cuda = "linked")]
        () => linked(),
        #[cfg(vrampool_cuda = "runtime")]
        () => match std::env::var_os(VARIABLE) {
            Some(path) if !path.is_empty() => open(&path),
            _ => open(OsStr::new(DEFAULT)),
        },
        #[cfg(vrampool_cuda = "off")]
        () => Err(Error::unavailable("no CUDA device: vrampool was built with VRAMPOOL_CUDA=off")),
    }
}

#[cfg(vrampool_cuda = "linked")]
fn linked() -> Result<(Functions, Binding)> {
    // SAFETY: dlsym: the name is a C string. The default handle searches what the program is linked with.
    let lookup = |name: &CStr| NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) });
    // SAFETY: the program is linked with the driver's library, which therefore stays loaded; nothing else has its names.
    let functions = unsafe { Functions::linked(&lookup) };
    let path = path_of(&functions).unwrap_or_else(|| DEFAULT.into());
    Ok((functions, Binding::Linked(path)))
}

/// Loads a library.
///
/// # Errors
/// [`Error::is_unavailable`] where it cannot be loaded, or lacks functions that every driver has.
pub(super) fn open(path: &OsStr) -> Result<(Functions, Binding)> {
    let shown = path.display();
    // SAFETY: dlopen runs the library's initialisers. That it is a CUDA driver's, which may be loaded at any time, is the
    // word of who named it: the system, for the driver's own name, or whoever set the variable or called `open`.
    let library = unsafe { libloading::os::unix::Library::new(path) }.map_err(|error| {
        // What the loader says is the error's cause, and names the file itself, mostly.
        let error = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        let error = if error.contains(&*path.to_string_lossy()) { error } else { format!("{shown}: {error}") };
        Error::unavailable(format!("no CUDA driver: {error} ({VARIABLE} can name another library)"))
    })?;
    let lookup = |name: &CStr| {
        // SAFETY: dlsym: the name is a C string with its zero byte; a symbol of any type is taken as an address alone.
        let symbol = unsafe { library.get::<*mut c_void>(name.to_bytes_with_nul()) };
        symbol.ok().and_then(|symbol| NonNull::new(symbol.as_raw_ptr()))
    };
    // SAFETY: the library is a CUDA driver's, as above, and is never unloaded.
    let bound = unsafe { Functions::bind(&lookup) };
    let functions = bound.map_err(|missing| {
        Error::unavailable(format!("no CUDA driver: {shown} lacks {}, which CUDA 10.1 and later have", missing.join(", ")))
    })?;
    // The driver leaves threads and exit handlers behind: it cannot be unloaded.
    std::mem::forget(library);
    let path = path_of(&functions).unwrap_or_else(|| path.into());
    Ok((functions, Binding::RunTime(path)))
}

/// The file that a library's functions were loaded from.
fn path_of(functions: &Functions) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: dladdr: any address may be asked for, and the answer goes to a local.
    let found = unsafe { libc::dladdr(functions.init as *const c_void, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr: the name is a C string of the loader's, which lives as long as the library is loaded: for good.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(OsStr::from_bytes(name.to_bytes()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_library_is_unavailable_by_name() {
        for name in ["/nowhere/libcuda.so.1", "/dev/null", "/"] {
            let error = open(OsStr::new(name)).unwrap_err();
            assert!(error.is_unavailable() && error.to_string().contains(name), "{error}");
            assert!(error.to_string().contains(VARIABLE), "{error}");
        }
    }

    #[test]
    fn a_library_that_is_no_driver_is_unavailable_by_what_it_lacks() {
        let error = open(OsStr::new("libc.so.6")).unwrap_err();
        assert!(error.is_unavailable() && error.to_string().contains("lacks cuInit, cuDriverGetVersion"), "{error}");
    }

    #[test]
    fn bindings_say_where_the_library_lies() {
        assert_eq!(Binding::Linked("/a/b".into()).to_string(), "linked: /a/b");
        assert_eq!(Binding::RunTime("c".into()).to_string(), "run time: c");
    }
}

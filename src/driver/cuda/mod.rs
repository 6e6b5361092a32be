//! The **CUDA driver** under the [`Driver`] trait.
//!
//! ```no_run
//! # fn main() -> Result<(), vrampool::Error> {
//! use vrampool::Device;
//!
//! // The first CUDA device; an error where there is no driver or no device.
//! let device = Device::first()?;
//! println!("{}", device.properties()?.name);
//! # Ok(())
//! # }
//! ```
//!
//! # Binding
//! The build script decides how the driver's library is found; the variable `VRAMPOOL_CUDA` tells it.
//!
//! | `VRAMPOOL_CUDA` | |
//! |---|---|
//! | `auto`, or unset | linked where the build script finds the real driver's library, otherwise bound at run time |
//! | `link` | linked; the build fails where no library is found. A stub from the toolkit will do |
//! | `dlopen` | bound at run time: `libcuda.so.1`, or the library that the variable `VRAMPOOL_LIBCUDA` names when the program runs |
//! | `off` | neither: [`CudaDriver::load`] is an error |
//!
//! `VRAMPOOL_CUDA_LIB_DIR` is a folder to search first. A program bound at run time starts on machines without CUDA, and
//! one built without CUDA runs on machines with it. A linked one needs the library to start.
//!
//! Functions that came after CUDA 10.1 are looked up either way. One that is missing is a missing capability in
//! [`DeviceProperties`], and calls that need it answer [`CuResult::ERROR_NOT_SUPPORTED`].
//!
//! # Contexts
//! A device's primary context is retained when a call first needs it, and is current for the call. The calling thread's own
//! context is put back on every path. Where the primary context is current already, that costs one look. Virtual memory
//! management and questions about devices need no context, and calls on events and modules none in particular. So a pool
//! that maps its memory retains none: its memory can be used in any context of the device, also in one made later.
//!
//! # The end of the process, and forks
//! Once the process is ending, and in a child forked from a process that uses CUDA, every call answers
//! [`CuResult::ERROR_DEINITIALIZED`] and does not reach the driver. A pool refuses every allocation with that code then,
//! frees are silent and do nothing, its counts are zero, and its end gives nothing back: the memory is gone, or is the
//! parent's. Nothing waits for a thread that only the parent has. A child that begins anew with `exec` can use CUDA.
//!
//! # Concurrency
//! Every call may be made from any thread. The only lock is held while a primary context is retained.
//!
//! # What it does not do
//! The per-thread default stream is used only where [`StreamHandle::PER_THREAD`] names it. A handle that the driver does
//! not know is passed on: the driver may crash on it, as [`Driver`] says.

#[cfg(all(test, feature = "cuda-sys"))]
mod agreement;
#[allow(unsafe_code)] // Every call into the driver.
mod calls;
#[allow(unsafe_code)] // Contexts, made current and put back.
mod context;
#[allow(unsafe_code)] // Closures behind C's pointers.
mod host;
#[allow(unsafe_code)] // Loading a library.
mod library;
#[allow(unsafe_code)] // Handlers for exit and fork.
mod process;
#[allow(unsafe_code)] // The driver's functions as C declares them.
mod sys;

pub use library::Binding;

// What the documentation links to.
use super::DriverResult;
#[allow(unused_imports)]
use super::{DeviceProperties, Driver, StreamHandle};
use crate::error::{CuResult, Error, Result};
use crate::sync::{Arc, Mutex};
use context::Contexts;
use std::fmt;
use std::path::Path;
use sys::Functions;

/// The CUDA driver. See the [module's documentation](self).
pub struct CudaDriver {
    functions: Functions,
    contexts: Contexts,
    devices: u32,
    binding: Binding,
}

/// The driver of the process, once somebody asked for it.
static LOADED: Mutex<Option<Arc<CudaDriver>>> = Mutex::new(None);

impl CudaDriver {
    /// The process's CUDA driver, bound as the program was built. The first call that succeeds loads it for good; every
    /// call returns the same.
    ///
    /// # Errors
    /// [`Error::is_unavailable`], saying what was tried: no library, one that is not a driver's or is only the toolkit's
    /// stub, no device, a driver that cannot be initialised, or a forked child.
    pub fn load() -> Result<Arc<Self>> {
        // In a child, another thread of the parent may have left the lock locked.
        refuse_child()?;
        let mut loaded = LOADED.lock();
        if let Some(driver) = &*loaded {
            return Ok(driver.clone());
        }
        let driver = Self::initialised(library::default()?)?;
        *loaded = Some(driver.clone());
        Ok(driver)
    }

    /// The driver of another library, apart from [`CudaDriver::load`]'s. The library is never unloaded; the primary
    /// contexts are released with the driver.
    ///
    /// # Errors
    /// As for [`CudaDriver::load`].
    pub fn open(library: impl AsRef<Path>) -> Result<Arc<Self>> {
        refuse_child()?;
        Self::initialised(library::open(library.as_ref().as_os_str())?)
    }

    /// How the driver's functions were found.
    #[must_use]
    pub fn binding(&self) -> &Binding {
        &self.binding
    }

    fn initialised((functions, binding): (Functions, Binding)) -> Result<Arc<Self>> {
        let devices = calls::initialise(&functions).map_err(|(call, code)| {
            Error::unavailable(match code {
                CuResult::ERROR_NO_DEVICE => format!("no CUDA device: the driver ({binding}) finds none: {call} answered {code}"),
                CuResult::ERROR_STUB_LIBRARY => {
                    format!("no CUDA driver: the library ({binding}) is the toolkit's stub and no driver: {call} answered {code}")
                }
                _ => format!("no CUDA driver: {call} of the driver ({binding}) failed with {code}"),
            })
        })?;
        if devices == 0 {
            return Err(Error::unavailable(format!("no CUDA device: the driver ({binding}) counts none")));
        }
        process::watch()
            .map_err(|error| Error::unavailable(format!("no CUDA driver: handlers for exit and fork are refused: error {error}")))?;
        Ok(Arc::new(Self { functions, contexts: Contexts::new(devices), devices, binding }))
    }

    /// The driver's functions, while they may be called.
    fn functions(&self) -> DriverResult<&Functions> {
        process::running().map(|()| &self.functions)
    }
}

fn refuse_child() -> Result<()> {
    match process::is_forked() {
        true => Err(Error::unavailable("no CUDA driver: this process was forked from one that uses CUDA, and the driver cannot follow")),
        false => Ok(()),
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        if process::running().is_ok() {
            self.contexts.release(&self.functions);
        }
    }
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDriver").field("binding", &self.binding).field("devices", &self.devices).finish_non_exhaustive()
    }
}

//! Conversions to and from the handles of the crate `cuda-sys`, for programs that call the driver through it beside the
//! pool (feature `cuda-sys`, Linux).
//!
//! ```
//! use cuda_sys::cuda::{CUdeviceptr, CUstream};
//! use vrampool::DevicePtr;
//! use vrampool::driver::StreamHandle;
//!
//! let block = DevicePtr::new(0x7000_0000);
//! assert_eq!(CUdeviceptr::from(block), 0x7000_0000);
//! let stream: CUstream = std::ptr::null_mut();
//! assert_eq!(StreamHandle::from(stream), StreamHandle::DEFAULT);
//! ```
//!
//! | here | there | |
//! |---|---|---|
//! | [`DevicePtr`] | `CUdeviceptr` | both ways |
//! | [`StreamHandle`] | `CUstream` | both ways |
//! | [`EventHandle`] | `CUevent` | both ways |
//! | [`ModuleHandle`] | `CUmodule` | both ways |
//! | [`FunctionHandle`] | `CUfunction` | both ways |
//! | [`DeviceId`] | `CUdevice` | both ways by `TryFrom`: one is unsigned, the other signed. That the driver's handle of a device is its ordinal holds for every driver known, and is not promised |
//! | [`CuResult`] | `CUresult` | from there only: it is a Rust enumeration that ends with CUDA 8, and a younger code has no value in it |
//!
//! A handle is a name for what the driver holds: converting it neither takes nor gives ownership. Of physical memory
//! ([`PhysicalHandle`](super::PhysicalHandle)) that crate knows nothing.
//!
//! vrampool itself calls the driver through its own declarations. A function of `cuda-sys` that answers with a code younger
//! than CUDA 8 is undefined behaviour.
//!
//! # Linking
//! `cuda-sys` has every program linked with `cuda`, `cudart` and `cublas`. Where the build script finds one of them, the
//! linker is told its folder; for one that is not there it supplies an empty archive, so that a program which calls none of
//! its functions is linked all the same. `CUDA_LIBRARY_PATH`, which `cuda-sys` reads, and `LIBRARY_PATH`, which the linker
//! does, name folders to look into first. With this feature no other crate of a program may have `links = "cuda"`.

use super::{EventHandle, FunctionHandle, ModuleHandle, StreamHandle};
use crate::error::CuResult;
use crate::units::{DeviceId, DevicePtr};
use cuda_sys::cuda::{CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUresult, CUstream};
use std::num::TryFromIntError;

impl From<CUdeviceptr> for DevicePtr {
    fn from(address: CUdeviceptr) -> Self {
        Self::new(address)
    }
}

impl From<DevicePtr> for CUdeviceptr {
    fn from(address: DevicePtr) -> Self {
        address.address()
    }
}

macro_rules! pointers {
    ($($handle:ident = $pointer:ident;)*) => {
        $(
            impl From<$pointer> for $handle {
                fn from(pointer: $pointer) -> Self {
                    Self(pointer.expose_provenance() as u64)
                }
            }

            impl From<$handle> for $pointer {
                fn from(handle: $handle) -> Self {
                    // 64 bits to 64 bits: the driver is bound on such platforms only.
                    std::ptr::with_exposed_provenance_mut(handle.0 as usize)
                }
            }
        )*
    };
}

pointers! {
    StreamHandle = CUstream;
    EventHandle = CUevent;
    ModuleHandle = CUmodule;
    FunctionHandle = CUfunction;
}

impl TryFrom<CUdevice> for DeviceId {
    type Error = TryFromIntError;

    fn try_from(device: CUdevice) -> Result<Self, TryFromIntError> {
        u32::try_from(device).map(Self)
    }
}

impl TryFrom<DeviceId> for CUdevice {
    type Error = TryFromIntError;

    fn try_from(device: DeviceId) -> Result<Self, TryFromIntError> {
        Self::try_from(device.0)
    }
}

impl From<CUresult> for CuResult {
    fn from(code: CUresult) -> Self {
        Self(code as i32)
    }
}

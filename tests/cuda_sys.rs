//! The conversions to and from the handles of `cuda-sys`, and the driver's codes beside that crate's.
#![cfg(all(feature = "cuda-sys", target_os = "linux"))]

use cuda_sys::cuda::{CUdevice, CUdeviceptr, CUevent_st, CUfunc_st, CUmod_st, CUresult, CUstream, CUstream_st};
use std::fmt::Debug;
use vrampool::DevicePtr;
use vrampool::driver::{EventHandle, FunctionHandle, ModuleHandle, StreamHandle};
use vrampool::error::CuResult;
use vrampool::units::DeviceId;

/// Values at the ends of the range, the default streams' among them.
const VALUES: [u64; 6] = [0, 1, 2, 0x7f00_1234_5678, i64::MAX as u64 + 1, u64::MAX];

#[test]
fn addresses_convert_both_ways() {
    for value in VALUES {
        assert_eq!(CUdeviceptr::from(DevicePtr::new(value)), value);
        assert_eq!(DevicePtr::from(value as CUdeviceptr), DevicePtr::new(value));
    }
}

/// Values pass unchanged through a handle and a pointer.
fn check<H, T>(handle: fn(u64) -> H)
where
    H: From<*mut T> + PartialEq + Debug,
    *mut T: From<H>,
{
    for value in VALUES {
        let pointer = <*mut T>::from(handle(value));
        assert_eq!(pointer.addr() as u64, value);
        assert_eq!(H::from(pointer), handle(value));
    }
}

#[test]
fn pointers_convert_both_ways() {
    check::<_, CUstream_st>(StreamHandle);
    check::<_, CUevent_st>(EventHandle);
    check::<_, CUmod_st>(ModuleHandle);
    check::<_, CUfunc_st>(FunctionHandle);
}

#[test]
fn default_streams_are_the_drivers_own_values() {
    assert!(CUstream::from(StreamHandle::DEFAULT).is_null());
    assert_eq!(CUstream::from(StreamHandle::LEGACY).addr(), 1);
    assert_eq!(CUstream::from(StreamHandle::PER_THREAD).addr(), 2);
}

#[test]
fn devices_convert_where_both_have_the_ordinal() {
    for ordinal in [0, 7, i32::MAX] {
        assert_eq!(DeviceId::try_from(ordinal as CUdevice), Ok(DeviceId(ordinal as u32)));
        assert_eq!(CUdevice::try_from(DeviceId(ordinal as u32)), Ok(ordinal));
    }
    DeviceId::try_from(-1).unwrap_err();
    CUdevice::try_from(DeviceId(1 << 31)).unwrap_err();
}

/// The driver's codes by their names there, as this crate has them from there.
macro_rules! codes {
    ($($name:ident)*) => {
        [$((stringify!($name), CuResult::from(CUresult::$name))),*]
    };
}

#[test]
fn codes_are_the_headers() {
    let theirs = codes! {
        CUDA_SUCCESS
        CUDA_ERROR_INVALID_VALUE
        CUDA_ERROR_OUT_OF_MEMORY
        CUDA_ERROR_NOT_INITIALIZED
        CUDA_ERROR_DEINITIALIZED
        CUDA_ERROR_NO_DEVICE
        CUDA_ERROR_INVALID_DEVICE
        CUDA_ERROR_INVALID_IMAGE
        CUDA_ERROR_INVALID_CONTEXT
        CUDA_ERROR_MAP_FAILED
        CUDA_ERROR_UNMAP_FAILED
        CUDA_ERROR_ALREADY_MAPPED
        CUDA_ERROR_NOT_MAPPED
        CUDA_ERROR_ECC_UNCORRECTABLE
        CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
        CUDA_ERROR_INVALID_PTX
        CUDA_ERROR_OPERATING_SYSTEM
        CUDA_ERROR_INVALID_HANDLE
        CUDA_ERROR_NOT_FOUND
        CUDA_ERROR_NOT_READY
        CUDA_ERROR_ILLEGAL_ADDRESS
        CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        CUDA_ERROR_LAUNCH_TIMEOUT
        CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
        CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
        CUDA_ERROR_CONTEXT_IS_DESTROYED
        CUDA_ERROR_LAUNCH_FAILED
        CUDA_ERROR_NOT_PERMITTED
        CUDA_ERROR_NOT_SUPPORTED
        CUDA_ERROR_UNKNOWN
    };
    let younger = [
        CuResult::ERROR_STUB_LIBRARY,
        CuResult::ERROR_DEVICE_UNAVAILABLE,
        CuResult::ERROR_ILLEGAL_STATE,
        CuResult::ERROR_SYSTEM_NOT_READY,
        CuResult::ERROR_STREAM_CAPTURE_UNSUPPORTED,
        CuResult::ERROR_STREAM_CAPTURE_INVALIDATED,
        CuResult::ERROR_STREAM_CAPTURE_MERGE,
        CuResult::ERROR_STREAM_CAPTURE_UNMATCHED,
        CuResult::ERROR_STREAM_CAPTURE_UNJOINED,
        CuResult::ERROR_STREAM_CAPTURE_ISOLATION,
        CuResult::ERROR_STREAM_CAPTURE_IMPLICIT,
        CuResult::ERROR_CAPTURED_EVENT,
        CuResult::ERROR_STREAM_CAPTURE_WRONG_THREAD,
    ];
    for (name, code) in theirs {
        assert_eq!(code.name(), Some(name));
    }
    // Each code that has a name here is in one of the two lists.
    let mut all: Vec<CuResult> = theirs.map(|(_, code)| code).into_iter().chain(younger).collect();
    all.sort();
    assert_eq!(all, CuResult::NAMED);
    assert_eq!(size_of::<CuResult>(), size_of::<CUresult>());
}

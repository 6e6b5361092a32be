//! The declarations of [`sys`](super::sys), held against those of the crate `cuda-sys`, which were made by a tool from
//! the header of CUDA 8.

use super::sys::{self, BASE, Functions, attribute};
use crate::error::CuResult;
use cuda_sys::cuda;
use std::any::type_name;
use std::collections::BTreeSet;
use std::ffi::{c_char, c_int, c_void};

/// A type that C passes as it passes `T`, by the same name or in the place of an opaque or enumerated one.
trait StandsFor<T> {}

macro_rules! stands {
    ($($ours:ty => $($theirs:ty),+;)*) => {
        $($(impl StandsFor<$theirs> for $ours {})+)*
    };
}

stands! {
    u8 => u8;
    c_char => c_char;
    c_int => c_int, cuda::CUdevice_attribute;
    u32 => u32;
    u64 => u64;
    usize => usize;
    CuResult => cuda::CUresult;
    c_void => c_void, cuda::CUctx_st, cuda::CUstream_st, cuda::CUevent_st, cuda::CUmod_st, cuda::CUfunc_st;
}

impl<T, U: StandsFor<T>> StandsFor<*mut T> for *mut U {}
impl<T, U: StandsFor<T>> StandsFor<*const T> for *const U {}

/// A function pointer whose every argument, and the result, stands for the other's.
trait SameSignature<F> {}

macro_rules! arities {
    ($(($($ours:ident $theirs:ident),*))*) => {
        $(
            impl<$($theirs, $ours: StandsFor<$theirs>,)* R, S: StandsFor<R>> SameSignature<unsafe extern "C" fn($($theirs),*) -> R>
                for unsafe extern "C" fn($($ours),*) -> S
            {
            }
        )*
    };
}

arities! {
    ()
    (A1 B1)
    (A1 B1, A2 B2)
    (A1 B1, A2 B2, A3 B3)
    (A1 B1, A2 B2, A3 B3, A4 B4)
    (A1 B1, A2 B2, A3 B3, A4 B4, A5 B5, A6 B6, A7 B7, A8 B8, A9 B9, A10 B10, A11 B11)
}

fn same<F: SameSignature<G>, G>(_ours: F, _theirs: G) {}

macro_rules! signatures {
    ($($ours:ident = $theirs:ident($($argument:tt),*);)*) => {
        /// Compared by the compiler. Never made for a type, and so never linked: that would ask for the driver's library.
        #[allow(dead_code, clippy::extra_unused_type_parameters)]
        fn signatures<NeverMade>(functions: &Functions) {
            $(same(functions.$ours, cuda::$theirs as unsafe extern "C" fn($($argument),*) -> _);)*
        }

        const COMPARED: &[&str] = &[$(stringify!($theirs)),*];
    };
}

signatures! {
    init = cuInit(_);
    driver_get_version = cuDriverGetVersion(_);
    device_get = cuDeviceGet(_, _);
    device_get_count = cuDeviceGetCount(_);
    device_get_name = cuDeviceGetName(_, _, _);
    device_total_mem = cuDeviceTotalMem_v2(_, _);
    device_get_attribute = cuDeviceGetAttribute(_, _, _);
    device_can_access_peer = cuDeviceCanAccessPeer(_, _, _);
    primary_ctx_retain = cuDevicePrimaryCtxRetain(_, _);
    primary_ctx_release = cuDevicePrimaryCtxRelease(_);
    ctx_get_current = cuCtxGetCurrent(_);
    ctx_push_current = cuCtxPushCurrent_v2(_);
    ctx_pop_current = cuCtxPopCurrent_v2(_);
    ctx_synchronize = cuCtxSynchronize();
    mem_get_info = cuMemGetInfo_v2(_, _);
    mem_alloc = cuMemAlloc_v2(_, _);
    mem_free = cuMemFree_v2(_);
    mem_alloc_host = cuMemAllocHost_v2(_, _);
    mem_free_host = cuMemFreeHost(_);
    mem_alloc_managed = cuMemAllocManaged(_, _, _);
    memcpy_async = cuMemcpyAsync(_, _, _, _);
    memcpy_host_to_device = cuMemcpyHtoD_v2(_, _, _);
    memcpy_device_to_host = cuMemcpyDtoH_v2(_, _, _);
    memset_d8_async = cuMemsetD8Async(_, _, _, _);
    stream_create = cuStreamCreate(_, _);
    stream_destroy = cuStreamDestroy_v2(_);
    stream_query = cuStreamQuery(_);
    stream_synchronize = cuStreamSynchronize(_);
    stream_wait_event = cuStreamWaitEvent(_, _, _);
    event_create = cuEventCreate(_, _);
    event_destroy = cuEventDestroy_v2(_);
    event_record = cuEventRecord(_, _);
    event_query = cuEventQuery(_);
    event_synchronize = cuEventSynchronize(_);
    module_load_data = cuModuleLoadData(_, _);
    module_unload = cuModuleUnload(_);
    module_get_function = cuModuleGetFunction(_, _, _);
    launch_kernel = cuLaunchKernel(_, _, _, _, _, _, _, _, _, _, _);
}

/// Functions of the base set that are younger than CUDA 8.
const YOUNGER: &[&str] = &["cuLaunchHostFunc", "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode"];

#[test]
fn every_base_function_of_cuda_8_is_compared() {
    let held: BTreeSet<&str> = COMPARED.iter().chain(YOUNGER).copied().collect();
    assert_eq!(held.len(), COMPARED.len() + YOUNGER.len());
    assert_eq!(held, BASE.iter().copied().collect());
}

#[test]
fn constants_are_the_headers() {
    use cuda::{CUdevice_attribute as Attribute, CUevent_flags as Event, CUmemAttach_flags as Attach, CUstream_flags as Stream};
    for (ours, theirs) in [
        (attribute::INTEGRATED, Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED),
        (attribute::COMPUTE_CAPABILITY_MAJOR, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        (attribute::COMPUTE_CAPABILITY_MINOR, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        (attribute::MANAGED_MEMORY, Attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY),
    ] {
        assert_eq!(ours, theirs as c_int, "{theirs:?}");
    }
    assert_eq!(sys::ATTACH_GLOBAL, Attach::CU_MEM_ATTACH_GLOBAL as u32);
    assert_eq!(sys::STREAM_DEFAULT, Stream::CU_STREAM_DEFAULT as u32);
    assert_eq!(sys::STREAM_NON_BLOCKING, Stream::CU_STREAM_NON_BLOCKING as u32);
    assert_eq!(sys::EVENT_DISABLE_TIMING, Event::CU_EVENT_DISABLE_TIMING as u32);
}

#[test]
fn sizes_and_alignments_are_the_headers() {
    fn same<Ours, Theirs>() {
        let (ours, theirs) = ((size_of::<Ours>(), align_of::<Ours>()), (size_of::<Theirs>(), align_of::<Theirs>()));
        assert_eq!(ours, theirs, "{} and {}", type_name::<Ours>(), type_name::<Theirs>());
    }
    same::<sys::Device, cuda::CUdevice>();
    same::<sys::Pointer, cuda::CUdeviceptr>();
    same::<sys::Context, cuda::CUcontext>();
    same::<sys::Stream, cuda::CUstream>();
    same::<sys::Event, cuda::CUevent>();
    same::<sys::Module, cuda::CUmodule>();
    same::<sys::Function, cuda::CUfunction>();
    same::<CuResult, cuda::CUresult>();
    same::<c_int, cuda::CUdevice_attribute>();
}

//! The driver API as C has it: types, constants, and the table of functions.
//!
//! Only what the [`Driver`](crate::driver::Driver) trait needs is here. Each function names the section of NVIDIA's *CUDA
//! Driver API* reference that its signature and its rules are from. Results and enumerations are integers: a value that
//! this crate does not know is a value like any other.
//!
//! The **base** functions are in every driver since CUDA 10.1, under these very names: they are what a program may be
//! linked with. The **optional** ones are younger; each is looked up, and one that is missing is a missing capability.
//! The variants for per-thread default streams (`_ptsz`, `_ptds`) are not used: stream 0 is the legacy stream here,
//! whatever the program was compiled with.

use crate::error::CuResult;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::{align_of, offset_of, size_of};
use std::ptr::NonNull;

/// `CUdevice`.
pub(super) type Device = c_int;
/// `CUdeviceptr`, which has the size of a pointer on 64-bit platforms.
pub(super) type Pointer = u64;
/// `CUcontext`.
pub(super) type Context = *mut c_void;
/// `CUstream`: a pointer, or one of the constants 0, 1, 2.
pub(super) type Stream = *mut c_void;
/// `CUevent`.
pub(super) type Event = *mut c_void;
/// `CUmodule`.
pub(super) type Module = *mut c_void;
/// `CUfunction`.
pub(super) type Function = *mut c_void;
/// `CUmemoryPool`.
pub(super) type MemoryPool = *mut c_void;
/// `CUmemGenericAllocationHandle`.
pub(super) type Physical = u64;
/// `CUhostFn`.
pub(super) type HostFunction = unsafe extern "C" fn(*mut c_void);

const _: () = assert!(size_of::<usize>() == 8, "the CUDA driver is bound on 64-bit platforms only");
const _: () = assert!(size_of::<CuResult>() == size_of::<c_int>() && align_of::<CuResult>() == align_of::<c_int>());

/// `CUdevice_attribute`.
pub(super) mod attribute {
    use std::ffi::c_int;

    pub(in super::super) const INTEGRATED: c_int = 18;
    pub(in super::super) const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    pub(in super::super) const COMPUTE_CAPABILITY_MINOR: c_int = 76;
    pub(in super::super) const MANAGED_MEMORY: c_int = 83;
    pub(in super::super) const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_int = 102;
    pub(in super::super) const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: c_int = 103;
    pub(in super::super) const GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: c_int = 110;
    pub(in super::super) const MEMORY_POOLS_SUPPORTED: c_int = 115;
    pub(in super::super) const HANDLE_TYPE_FABRIC_SUPPORTED: c_int = 128;
}

/// `CU_MEM_ATTACH_GLOBAL`.
pub(super) const ATTACH_GLOBAL: c_uint = 1;
/// `CU_STREAM_DEFAULT`.
pub(super) const STREAM_DEFAULT: c_uint = 0;
/// `CU_STREAM_NON_BLOCKING`.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_STREAM_CAPTURE_MODE_GLOBAL`.
pub(super) const CAPTURE_MODE_GLOBAL: c_int = 0;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.
pub(super) const CAPTURE_MODE_THREAD_LOCAL: c_int = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(super) const CAPTURE_MODE_RELAXED: c_int = 2;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
pub(super) const CAPTURE_STATUS_NONE: c_int = 0;
/// `CU_STREAM_CAPTURE_STATUS_ACTIVE`.
pub(super) const CAPTURE_STATUS_ACTIVE: c_int = 1;
/// `CU_STREAM_CAPTURE_STATUS_INVALIDATED`.
pub(super) const CAPTURE_STATUS_INVALIDATED: c_int = 2;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
pub(super) const GRANULARITY_MINIMUM: c_int = 0;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`.
pub(super) const GRANULARITY_RECOMMENDED: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(super) const ALLOCATION_TYPE_PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(super) const LOCATION_TYPE_DEVICE: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_NONE`.
pub(super) const ACCESS_NONE: c_int = 0;
/// `CU_MEM_ACCESS_FLAGS_PROT_READ`.
pub(super) const ACCESS_READ: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(super) const ACCESS_READ_WRITE: c_int = 3;

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`, whose value has 64 bits.
pub(super) const POOL_RELEASE_THRESHOLD: c_int = 4;

/// `CUmemLocation`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(super) struct MemLocation {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

const _: () = {
    assert!(size_of::<MemLocation>() == 8 && align_of::<MemLocation>() == 4);
    assert!(offset_of!(MemLocation, kind) == 0 && offset_of!(MemLocation, id) == 4);
};

impl MemLocation {
    pub(super) const fn device(ordinal: c_int) -> Self {
        Self { kind: LOCATION_TYPE_DEVICE, id: ordinal }
    }
}

/// The struct `allocFlags` inside `CUmemAllocationProp`; 8 reserved bytes in CUDA 10.2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(super) struct MemAllocationFlags {
    pub(super) compression_type: u8,
    pub(super) gpu_direct_rdma_capable: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(super) struct MemAllocationProp {
    pub(super) kind: c_int,
    pub(super) requested_handle_types: c_int,
    pub(super) location: MemLocation,
    pub(super) win32_handle_meta_data: *mut c_void,
    pub(super) flags: MemAllocationFlags,
}

const _: () = {
    assert!(size_of::<MemAllocationFlags>() == 8 && align_of::<MemAllocationFlags>() == 2);
    assert!(size_of::<MemAllocationProp>() == 32 && align_of::<MemAllocationProp>() == 8);
    assert!(offset_of!(MemAllocationProp, kind) == 0 && offset_of!(MemAllocationProp, requested_handle_types) == 4);
    assert!(offset_of!(MemAllocationProp, location) == 8 && offset_of!(MemAllocationProp, win32_handle_meta_data) == 16);
    assert!(offset_of!(MemAllocationProp, flags) == 24);
    assert!(offset_of!(MemAllocationFlags, compression_type) == 0 && offset_of!(MemAllocationFlags, gpu_direct_rdma_capable) == 1);
    assert!(offset_of!(MemAllocationFlags, usage) == 2 && offset_of!(MemAllocationFlags, reserved) == 4);
};

impl MemAllocationProp {
    /// Pinned memory of a device, for cards to reach and to be shared as said; every field without a meaning here is zero, as
    /// the reference asks.
    pub(super) const fn device(ordinal: c_int, rdma: bool, handle_types: c_int) -> Self {
        Self {
            kind: ALLOCATION_TYPE_PINNED,
            requested_handle_types: handle_types,
            location: MemLocation::device(ordinal),
            win32_handle_meta_data: std::ptr::null_mut(),
            flags: MemAllocationFlags { compression_type: 0, gpu_direct_rdma_capable: rdma as u8, usage: 0, reserved: [0; 4] },
        }
    }
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(super) struct MemAccessDesc {
    pub(super) location: MemLocation,
    pub(super) flags: c_int,
}

const _: () = {
    assert!(size_of::<MemAccessDesc>() == 12 && align_of::<MemAccessDesc>() == 4);
    assert!(offset_of!(MemAccessDesc, location) == 0 && offset_of!(MemAccessDesc, flags) == 8);
};

/// Where a function of a library is, or `None` where the library lacks it.
pub(super) type Lookup<'a> = &'a dyn Fn(&CStr) -> Option<NonNull<c_void>>;

macro_rules! functions {
    (
        base { $($(#[$base_doc:meta])* $base:ident = $base_symbol:literal ($($base_argument:ident: $base_type:ty),* $(,)?);)* }
        optional { $($(#[$optional_doc:meta])* $optional:ident = $optional_symbol:literal ($($argument:ident: $type:ty),* $(,)?);)* }
    ) => {
        /// The functions of one driver library.
        #[derive(Clone, Copy, Debug)]
        pub(super) struct Functions {
            $($(#[$base_doc])* pub(super) $base: unsafe extern "C" fn($($base_argument: $base_type),*) -> CuResult,)*
            $($(#[$optional_doc])* pub(super) $optional: Option<unsafe extern "C" fn($($argument: $type),*) -> CuResult>,)*
        }

        /// The symbols that every driver must have.
        #[cfg(test)]
        pub(super) const BASE: &[&str] = &[$($base_symbol),*];

        /// The symbols that a driver may lack.
        #[cfg(test)]
        pub(super) const OPTIONAL: &[&str] = &[$($optional_symbol),*];

        #[cfg(vrampool_cuda = "linked")]
        mod linked {
            use super::*;

            unsafe extern "C" {
                $(#[link_name = $base_symbol] pub(super) fn $base($($base_argument: $base_type),*) -> CuResult;)*
            }
        }

        impl Functions {
            /// The table over a library whose functions `lookup` finds.
            ///
            /// # Errors
            /// The symbols of the base set that are missing.
            ///
            /// # Safety
            /// What `lookup` finds under a name of the CUDA driver API must be that function, and stay loaded for as long
            /// as the table is used.
            pub(super) unsafe fn bind(lookup: Lookup<'_>) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                $(let $base = lookup(symbol(concat!($base_symbol, "\0")));
                if $base.is_none() {
                    missing.push($base_symbol);
                })*
                match ($($base,)*) {
                    ($(Some($base),)*) => Ok(Self {
                        // SAFETY: the caller says that this is the function of that name, whose signature is the
                        // reference's in the section named with the field; function and data pointers are of one size on
                        // POSIX systems (dlsym).
                        $($base: unsafe {
                            std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($base_argument: $base_type),*) -> CuResult>($base)
                        },)*
                        $($optional: {
                            let found = lookup(symbol(concat!($optional_symbol, "\0")));
                            // SAFETY: as above.
                            found.map(|found| unsafe {
                                std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($argument: $type),*) -> CuResult>(found)
                            })
                        },)*
                    }),
                    _ => Err(missing),
                }
            }

            /// The table over the library that the program is linked with; the optional functions are looked up.
            ///
            /// # Safety
            /// As for [`Functions::bind`].
            #[cfg(vrampool_cuda = "linked")]
            pub(super) unsafe fn linked(lookup: Lookup<'_>) -> Self {
                Self {
                    $($base: linked::$base,)*
                    $($optional: {
                        let found = lookup(symbol(concat!($optional_symbol, "\0")));
                        // SAFETY: as in `bind`.
                        found.map(|found| unsafe {
                            std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($argument: $type),*) -> CuResult>(found)
                        })
                    },)*
                }
            }
        }
    };
}

/// A symbol as C has it. `name` ends with its only zero byte.
fn symbol(name: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or(c"")
}

functions! {
    base {
        // ---- Initialization; Version Management; Device Management; Peer Context Memory Access ----

        /// Initialization: `cuInit`.
        init = "cuInit"(flags: c_uint);
        /// Version Management: `cuDriverGetVersion`.
        driver_get_version = "cuDriverGetVersion"(version: *mut c_int);
        /// Device Management: `cuDeviceGet`.
        device_get = "cuDeviceGet"(device: *mut Device, ordinal: c_int);
        /// Device Management: `cuDeviceGetCount`.
        device_get_count = "cuDeviceGetCount"(count: *mut c_int);
        /// Device Management: `cuDeviceGetName`.
        device_get_name = "cuDeviceGetName"(name: *mut c_char, bytes: c_int, device: Device);
        /// Device Management: `cuDeviceTotalMem`.
        device_total_mem = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: Device);
        /// Device Management: `cuDeviceGetAttribute`.
        device_get_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: Device);
        /// Peer Context Memory Access: `cuDeviceCanAccessPeer`.
        device_can_access_peer = "cuDeviceCanAccessPeer"(can: *mut c_int, device: Device, peer: Device);

        // ---- Primary Context Management; Context Management ----

        /// Primary Context Management: `cuDevicePrimaryCtxRetain`.
        primary_ctx_retain = "cuDevicePrimaryCtxRetain"(context: *mut Context, device: Device);
        /// Primary Context Management: `cuDevicePrimaryCtxRelease`, by its name before CUDA 11.
        primary_ctx_release = "cuDevicePrimaryCtxRelease"(device: Device);
        /// Context Management: `cuCtxGetCurrent`.
        ctx_get_current = "cuCtxGetCurrent"(context: *mut Context);
        /// Context Management: `cuCtxPushCurrent`.
        ctx_push_current = "cuCtxPushCurrent_v2"(context: Context);
        /// Context Management: `cuCtxPopCurrent`.
        ctx_pop_current = "cuCtxPopCurrent_v2"(context: *mut Context);
        /// Context Management: `cuCtxSynchronize`.
        ctx_synchronize = "cuCtxSynchronize"();

        // ---- Memory Management; Unified Addressing ----

        /// Memory Management: `cuMemGetInfo`.
        mem_get_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
        /// Memory Management: `cuMemAlloc`.
        mem_alloc = "cuMemAlloc_v2"(address: *mut Pointer, bytes: usize);
        /// Memory Management: `cuMemFree`.
        mem_free = "cuMemFree_v2"(address: Pointer);
        /// Memory Management: `cuMemAllocHost`.
        mem_alloc_host = "cuMemAllocHost_v2"(address: *mut *mut c_void, bytes: usize);
        /// Memory Management: `cuMemFreeHost`.
        mem_free_host = "cuMemFreeHost"(address: *mut c_void);
        /// Memory Management: `cuMemAllocManaged`.
        mem_alloc_managed = "cuMemAllocManaged"(address: *mut Pointer, bytes: usize, flags: c_uint);
        /// Memory Management: `cuMemcpyAsync`.
        memcpy_async = "cuMemcpyAsync"(destination: Pointer, source: Pointer, bytes: usize, stream: Stream);
        /// Memory Management: `cuMemcpyHtoD`.
        memcpy_host_to_device = "cuMemcpyHtoD_v2"(destination: Pointer, source: *const c_void, bytes: usize);
        /// Memory Management: `cuMemcpyDtoH`.
        memcpy_device_to_host = "cuMemcpyDtoH_v2"(destination: *mut c_void, source: Pointer, bytes: usize);
        /// Memory Management: `cuMemsetD8Async`.
        memset_d8_async = "cuMemsetD8Async"(address: Pointer, value: u8, bytes: usize, stream: Stream);

        // ---- Stream Management; Event Management ----

        /// Stream Management: `cuStreamCreate`.
        stream_create = "cuStreamCreate"(stream: *mut Stream, flags: c_uint);
        /// Stream Management: `cuStreamDestroy`.
        stream_destroy = "cuStreamDestroy_v2"(stream: Stream);
        /// Stream Management: `cuStreamQuery`.
        stream_query = "cuStreamQuery"(stream: Stream);
        /// Stream Management: `cuStreamSynchronize`.
        stream_synchronize = "cuStreamSynchronize"(stream: Stream);
        /// Stream Management: `cuStreamWaitEvent`.
        stream_wait_event = "cuStreamWaitEvent"(stream: Stream, event: Event, flags: c_uint);
        /// Stream Management: `cuStreamIsCapturing`.
        stream_is_capturing = "cuStreamIsCapturing"(stream: Stream, status: *mut c_int);
        /// Stream Management: `cuThreadExchangeStreamCaptureMode`.
        thread_exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(mode: *mut c_int);
        /// Execution Control: `cuLaunchHostFunc`.
        launch_host_func = "cuLaunchHostFunc"(stream: Stream, function: HostFunction, data: *mut c_void);
        /// Event Management: `cuEventCreate`.
        event_create = "cuEventCreate"(event: *mut Event, flags: c_uint);
        /// Event Management: `cuEventDestroy`.
        event_destroy = "cuEventDestroy_v2"(event: Event);
        /// Event Management: `cuEventRecord`.
        event_record = "cuEventRecord"(event: Event, stream: Stream);
        /// Event Management: `cuEventQuery`.
        event_query = "cuEventQuery"(event: Event);
        /// Event Management: `cuEventSynchronize`.
        event_synchronize = "cuEventSynchronize"(event: Event);

        // ---- Module Management; Execution Control ----

        /// Module Management: `cuModuleLoadData`.
        module_load_data = "cuModuleLoadData"(module: *mut Module, image: *const c_void);
        /// Module Management: `cuModuleUnload`.
        module_unload = "cuModuleUnload"(module: Module);
        /// Module Management: `cuModuleGetFunction`.
        module_get_function = "cuModuleGetFunction"(function: *mut Function, module: Module, name: *const c_char);
        /// Execution Control: `cuLaunchKernel`.
        launch_kernel = "cuLaunchKernel"(
            function: Function,
            grid_x: c_uint,
            grid_y: c_uint,
            grid_z: c_uint,
            block_x: c_uint,
            block_y: c_uint,
            block_z: c_uint,
            shared_bytes: c_uint,
            stream: Stream,
            arguments: *mut *mut c_void,
            extra: *mut *mut c_void,
        );
    }
    optional {
        /// Primary Context Management: `cuDevicePrimaryCtxRelease` (CUDA 11.0).
        primary_ctx_release_v2 = "cuDevicePrimaryCtxRelease_v2"(device: Device);
        /// Virtual Memory Management: `cuMemGetAllocationGranularity` (CUDA 10.2).
        mem_get_allocation_granularity =
            "cuMemGetAllocationGranularity"(granularity: *mut usize, properties: *const MemAllocationProp, option: c_int);
        /// Virtual Memory Management: `cuMemAddressReserve` (CUDA 10.2).
        mem_address_reserve =
            "cuMemAddressReserve"(address: *mut Pointer, bytes: usize, alignment: usize, wanted: Pointer, flags: u64);
        /// Virtual Memory Management: `cuMemAddressFree` (CUDA 10.2).
        mem_address_free = "cuMemAddressFree"(address: Pointer, bytes: usize);
        /// Virtual Memory Management: `cuMemCreate` (CUDA 10.2).
        mem_create = "cuMemCreate"(handle: *mut Physical, bytes: usize, properties: *const MemAllocationProp, flags: u64);
        /// Virtual Memory Management: `cuMemRelease` (CUDA 10.2).
        mem_release = "cuMemRelease"(handle: Physical);
        /// Virtual Memory Management: `cuMemMap` (CUDA 10.2).
        mem_map = "cuMemMap"(address: Pointer, bytes: usize, offset: usize, handle: Physical, flags: u64);
        /// Virtual Memory Management: `cuMemUnmap` (CUDA 10.2).
        mem_unmap = "cuMemUnmap"(address: Pointer, bytes: usize);
        /// Virtual Memory Management: `cuMemSetAccess` (CUDA 10.2).
        mem_set_access = "cuMemSetAccess"(address: Pointer, bytes: usize, access: *const MemAccessDesc, count: usize);
        /// Stream Ordered Memory Allocator: `cuMemAllocAsync` (CUDA 11.2).
        mem_alloc_async = "cuMemAllocAsync"(address: *mut Pointer, bytes: usize, stream: Stream);
        /// Stream Ordered Memory Allocator: `cuMemFreeAsync` (CUDA 11.2).
        mem_free_async = "cuMemFreeAsync"(address: Pointer, stream: Stream);
        /// Device Management: `cuDeviceGetDefaultMemPool` (CUDA 11.2).
        device_get_default_mem_pool = "cuDeviceGetDefaultMemPool"(pool: *mut MemoryPool, device: Device);
        /// Stream Ordered Memory Allocator: `cuMemPoolSetAttribute` (CUDA 11.2).
        mem_pool_set_attribute = "cuMemPoolSetAttribute"(pool: MemoryPool, attribute: c_int, value: *mut c_void);
        /// Stream Management: `cuStreamGetId` (CUDA 12.0).
        stream_get_id = "cuStreamGetId"(stream: Stream, id: *mut u64);
    }
}

impl Functions {
    /// Whether all of virtual memory management is there: part of it is of no use.
    pub(super) fn has_virtual_memory_management(&self) -> bool {
        self.mem_get_allocation_granularity.is_some()
            && self.mem_address_reserve.is_some()
            && self.mem_address_free.is_some()
            && self.mem_create.is_some()
            && self.mem_release.is_some()
            && self.mem_map.is_some()
            && self.mem_unmap.is_some()
            && self.mem_set_access.is_some()
    }

    /// Whether all of the stream-ordered allocator is there that is used here.
    pub(super) fn has_memory_pools(&self) -> bool {
        self.mem_alloc_async.is_some()
            && self.mem_free_async.is_some()
            && self.device_get_default_mem_pool.is_some()
            && self.mem_pool_set_attribute.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Call;
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    /// An address that is never called.
    fn somewhere() -> Option<NonNull<c_void>> {
        Some(NonNull::dangling())
    }

    #[test]
    fn names_are_symbols_of_their_own() {
        let names: BTreeSet<&str> = BASE.iter().chain(OPTIONAL).copied().collect();
        assert_eq!(names.len(), BASE.len() + OPTIONAL.len());
        for name in names {
            assert!(name.starts_with("cu") && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'), "{name}");
            assert!(!name.contains("_pts") && !name.contains("_ptds"), "{name} is of per-thread default streams");
            assert_eq!(symbol(Box::leak(format!("{name}\0").into_boxed_str())).to_str(), Ok(name));
        }
    }

    #[test]
    fn every_call_of_the_trait_has_its_function() {
        let unversioned: BTreeSet<&str> = BASE.iter().chain(OPTIONAL).map(|name| name.trim_end_matches("_v2")).collect();
        for call in Call::ALL {
            assert!(unversioned.contains(call.name()), "{}", call.name());
        }
    }

    #[test]
    fn what_the_base_lacks_is_named_and_what_is_optional_is_not_asked_for() {
        for &left_out in BASE {
            // SAFETY: no function of the table is called.
            let bound = unsafe { Functions::bind(&|name| if name.to_str() == Ok(left_out) { None } else { somewhere() }) };
            assert_eq!(bound.err(), Some(vec![left_out]));
        }
        // SAFETY: as above.
        let nothing = unsafe { Functions::bind(&|_| None) };
        assert_eq!(nothing.err().as_deref(), Some(BASE));
        // SAFETY: as above.
        let old = unsafe { Functions::bind(&|name| if BASE.contains(&name.to_str().unwrap()) { somewhere() } else { None }) };
        let old = old.unwrap();
        assert!(!old.has_virtual_memory_management() && !old.has_memory_pools() && old.stream_get_id.is_none());
    }

    #[test]
    fn a_family_of_functions_is_all_or_nothing() {
        let of_pools = ["cuMemAllocAsync", "cuMemFreeAsync", "cuDeviceGetDefaultMemPool", "cuMemPoolSetAttribute"];
        assert!(of_pools.iter().all(|name| OPTIONAL.contains(name)));
        for &left_out in OPTIONAL {
            // SAFETY: no function of the table is called.
            let bound = unsafe { Functions::bind(&|name| if name.to_str() == Ok(left_out) { None } else { somewhere() }) }.unwrap();
            let is_of_pools = of_pools.contains(&left_out);
            assert_eq!(bound.has_memory_pools(), !is_of_pools, "{left_out}");
            assert_eq!(bound.has_virtual_memory_management(), is_of_pools || !left_out.starts_with("cuMem"), "{left_out}");
        }
    }

    #[test]
    fn every_symbol_is_looked_up_once() {
        let asked = RefCell::new(Vec::new());
        let lookup = |name: &CStr| {
            asked.borrow_mut().push(name.to_str().unwrap().to_owned());
            somewhere()
        };
        // SAFETY: no function of the table is called.
        _ = unsafe { Functions::bind(&lookup) };
        assert_eq!(*asked.borrow(), [BASE, OPTIONAL].concat());
    }

    #[test]
    fn properties_are_zero_but_for_what_is_asked_for() {
        for (rdma, handle_types) in [(false, 0), (true, 0), (false, 8), (true, 1)] {
            let properties = MemAllocationProp::device(3, rdma, handle_types);
            // SAFETY: 32 bytes without padding, asserted above, all of them initialised; a null pointer is zeros.
            let bytes: [u8; 32] = unsafe { std::mem::transmute(properties) };
            let mut expected = [0; 32];
            (expected[0], expected[4], expected[8], expected[12], expected[25]) = (1, handle_types as u8, 1, 3, rdma.into());
            assert_eq!(bytes, expected);
        }
    }
}

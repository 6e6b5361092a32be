//! **Driver layer**: what a GPU gives — memory, address ranges, physical handles, streams, events.
//!
//! [`Driver`] is the one seam between the pool and the world. Every layer above runs unchanged over [CUDA](cuda) and over the
//! [simulated device](sim), and nothing above calls CUDA by another way. The trait speaks in the driver API's own
//! terms; each method names the function it stands for, and its contract is that function's.
//!
//! # Rules that hold for every method
//!
//! - **Result.** `Ok` is `CUDA_SUCCESS`; anything else is the driver's code, unchanged. A code may come from earlier
//!   asynchronous work rather than from the call that returned it.
//! - **Context.** A method that takes a [`DeviceId`] runs with that device's primary context current and leaves the
//!   calling thread's own context as it found it.
//! - **Threads.** Every method may be called from any thread at any time. No method may be called with a lock of this
//!   crate held: a call can take milliseconds, and a host function may run in it.
//! - **Failure.** A call that fails has no effect.
//! - **Capabilities** are asked ([`DeviceProperties`]), never inferred from a version.
//! - **Streams.** [`StreamHandle::LEGACY`] and [`StreamHandle::PER_THREAD`] are the default streams of the device named
//!   in the call.

mod call;
#[cfg(feature = "testing")]
pub mod conformance;
mod device;
pub mod kernels;
mod meter;
mod types;

#[cfg(target_os = "linux")]
pub mod cuda;
#[cfg(all(target_os = "linux", feature = "cuda-sys"))]
pub mod interop;
#[cfg(feature = "sim")]
pub mod sim;

pub use call::Call;
pub use device::{Device, DeviceChoice};
pub use meter::{CallCounts, Meter};
pub use types::{
    AccessDescriptor, AccessFlags, CaptureMode, CaptureStatus, DeviceProperties, EventHandle, FunctionHandle, Granularity,
    HandleProperties, HandleTypes, KernelArgument, LaunchConfig, MemoryInfo, MemoryKind, ModuleHandle, PhysicalHandle, StreamFlags,
    StreamHandle,
};

use crate::error::CuResult;
use crate::units::{DeviceId, DevicePtr};
use std::fmt;

/// What a call to the driver returns: its value, or the driver's code.
pub type DriverResult<T> = Result<T, CuResult>;

/// The CUDA driver as the pool sees it, or something that obeys the same rules.
///
/// See the [module's documentation](self) for the rules that hold for every method.
pub trait Driver: fmt::Debug + Send + Sync {
    // ---- the driver and its devices ----

    /// The newest CUDA version that the driver supports, as 1000 × major + 10 × minor (`cuDriverGetVersion`). For
    /// people to read: what a device can do is asked of [`Driver::device_properties`].
    ///
    /// # Errors
    /// The driver's code.
    fn version(&self) -> DriverResult<i32>;

    /// The number of devices (`cuDeviceGetCount`). Zero is no error.
    ///
    /// # Errors
    /// The driver's code.
    fn device_count(&self) -> DriverResult<u32>;

    /// What a device is and can do (`cuDeviceGetName`, `cuDeviceTotalMem`, `cuDeviceGetAttribute`).
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_DEVICE`] for an ordinal that there is no device for.
    fn device_properties(&self, device: DeviceId) -> DriverResult<DeviceProperties>;

    /// Whether work on `device` can reach the memory of `peer` (`cuDeviceCanAccessPeer`).
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_DEVICE`].
    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> DriverResult<bool>;

    /// The device's memory, free and in all, as the driver sees it for every process together (`cuMemGetInfo`).
    ///
    /// # Errors
    /// The driver's code.
    fn memory_info(&self, device: DeviceId) -> DriverResult<MemoryInfo>;

    // ---- plain allocation ----

    /// Allocates `bytes` bytes of one kind: `cuMemAlloc`, `cuMemAllocHost`, or `cuMemAllocManaged` attached globally.
    /// The address is a multiple of 256.
    ///
    /// # Errors
    /// [`CuResult::ERROR_OUT_OF_MEMORY`]; [`CuResult::ERROR_INVALID_VALUE`] for zero bytes, but of pinned memory, of which
    /// the driver answers with the null address.
    fn mem_alloc(&self, device: DeviceId, kind: MemoryKind, bytes: u64) -> DriverResult<DevicePtr>;

    /// Frees what [`Driver::mem_alloc`] of the same device and kind returned (`cuMemFree`, `cuMemFreeHost`). It waits for
    /// the context's queued work. Freeing the null address does nothing.
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_VALUE`] for an address that is not the start of such an allocation.
    fn mem_free(&self, device: DeviceId, kind: MemoryKind, address: DevicePtr) -> DriverResult<()>;

    // ---- the driver's own stream-ordered allocator: where the device has memory pools ----

    /// Allocates memory of the device from its default pool, in the order of a stream (`cuMemAllocAsync`): work may touch
    /// it that is queued on the stream after this, or comes after such work. The address is a multiple of 256; of zero bytes
    /// it is null.
    ///
    /// # Errors
    /// [`CuResult::ERROR_NOT_SUPPORTED`] where [`DeviceProperties::memory_pools`] is false;
    /// [`CuResult::ERROR_OUT_OF_MEMORY`].
    fn mem_alloc_async(&self, device: DeviceId, bytes: u64, stream: StreamHandle) -> DriverResult<DevicePtr> {
        _ = (device, bytes, stream);
        Err(CuResult::ERROR_NOT_SUPPORTED)
    }

    /// Frees what [`Driver::mem_alloc_async`] of the same device returned, once the stream has done what is queued on it
    /// (`cuMemFreeAsync`). Whatever touches the memory must come before that. Freeing the null address does nothing; memory of
    /// another call must not be freed so: the driver may take it, and crash later.
    ///
    /// # Errors
    /// [`CuResult::ERROR_NOT_SUPPORTED`] where [`DeviceProperties::memory_pools`] is false;
    /// [`CuResult::ERROR_INVALID_VALUE`] for an address that is not the start of such an allocation.
    fn mem_free_async(&self, device: DeviceId, address: DevicePtr, stream: StreamHandle) -> DriverResult<()> {
        _ = (device, address, stream);
        Err(CuResult::ERROR_NOT_SUPPORTED)
    }

    /// How many bytes of freed memory the device's default pool keeps when work is synchronised; 0 at first
    /// (`cuDeviceGetDefaultMemPool`, and `cuMemPoolSetAttribute` with `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`).
    ///
    /// # Errors
    /// [`CuResult::ERROR_NOT_SUPPORTED`] where [`DeviceProperties::memory_pools`] is false.
    fn mem_pool_threshold(&self, device: DeviceId, bytes: u64) -> DriverResult<()> {
        _ = (device, bytes);
        Err(CuResult::ERROR_NOT_SUPPORTED)
    }

    // ---- virtual memory management ----

    /// What sizes of handles and addresses of mappings must be multiples of (`cuMemGetAllocationGranularity`).
    ///
    /// # Errors
    /// [`CuResult::ERROR_NOT_SUPPORTED`] where there is no virtual memory management.
    fn mem_granularity(&self, properties: &HandleProperties) -> DriverResult<Granularity>;

    /// Reserves `bytes` bytes of addresses (`cuMemAddressReserve`). No memory stands behind them. `alignment` is a power
    /// of two, or 0 for the granularity.
    ///
    /// # Errors
    /// [`CuResult::ERROR_OUT_OF_MEMORY`] where the address space is used up; [`CuResult::ERROR_INVALID_VALUE`] for a
    /// size off the granularity or a bad alignment.
    fn mem_address_reserve(&self, bytes: u64, alignment: u64) -> DriverResult<DevicePtr>;

    /// Gives back a whole reservation in which nothing is mapped (`cuMemAddressFree`).
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_VALUE`] for another range than one reserved.
    fn mem_address_free(&self, address: DevicePtr, bytes: u64) -> DriverResult<()>;

    /// Makes physical memory (`cuMemCreate`). It goes on working in a process whose context is broken, as all virtual
    /// memory management does: a pool can give its memory back after a kernel failed.
    ///
    /// # Errors
    /// [`CuResult::ERROR_OUT_OF_MEMORY`], which the driver also returns where handles run out;
    /// [`CuResult::ERROR_INVALID_VALUE`] for a size off the granularity, and for a handle type of another system (types that
    /// it does not know at all it may pass over); [`CuResult::ERROR_NOT_SUPPORTED`] for what the device cannot, and
    /// [`CuResult::ERROR_NOT_PERMITTED`] for a fabric handle that this process may not make.
    fn mem_create(&self, bytes: u64, properties: &HandleProperties) -> DriverResult<PhysicalHandle>;

    /// Drops the handle (`cuMemRelease`). The memory goes back when it is mapped nowhere.
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_VALUE`] for handle 0 and, mostly, for one released before. The driver may crash on any
    /// other value.
    fn mem_release(&self, handle: PhysicalHandle) -> DriverResult<()>;

    /// Maps a whole handle at a reserved address (`cuMemMap`). `offset` must be 0 and `bytes` the handle's size. The
    /// mapping has no access until [`Driver::mem_set_access`].
    ///
    /// # Errors
    /// [`CuResult::ERROR_NOT_SUPPORTED`] for an offset or another size than the handle's;
    /// [`CuResult::ERROR_INVALID_VALUE`] for 0 bytes, and for an address off the granularity, outside a reservation, or
    /// mapped already. The driver may crash on a handle that is not live.
    fn mem_map(&self, address: DevicePtr, bytes: u64, offset: u64, handle: PhysicalHandle) -> DriverResult<()>;

    /// Unmaps one whole mapping (`cuMemUnmap`). It waits for nothing: the caller has seen to it that no queued work
    /// touches the range.
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_VALUE`] for a range that cuts a mapping. Some drivers take a range of several whole
    /// mappings, or of none; callers may not rely on either answer.
    fn mem_unmap(&self, address: DevicePtr, bytes: u64) -> DriverResult<()>;

    /// Sets which devices may use the mappings in a range, and how (`cuMemSetAccess`).
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_VALUE`] where the range is not made of whole mappings.
    fn mem_set_access(&self, address: DevicePtr, bytes: u64, access: &[AccessDescriptor]) -> DriverResult<()>;

    // ---- streams and events ----

    /// Creates a stream in the device's context (`cuStreamCreate`).
    ///
    /// # Errors
    /// The driver's code.
    fn stream_create(&self, device: DeviceId, flags: StreamFlags) -> DriverResult<StreamHandle>;

    /// Destroys a stream (`cuStreamDestroy`). It returns at once; work already queued still runs. The driver may give
    /// the handle's value to a later stream.
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_HANDLE`] for a default stream.
    fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()>;

    /// A number that names the stream for the life of the program, unlike its handle (`cuStreamGetId`).
    ///
    /// # Errors
    /// [`CuResult::ERROR_NOT_SUPPORTED`] where the driver has no such call.
    fn stream_id(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<u64>;

    /// Whether everything queued on the stream is done (`cuStreamQuery`). The legacy stream is done when the blocking
    /// streams are as well. A blocking stream on which nothing but records and waits is queued behind the legacy stream's
    /// work may count as done (seen on an H200), though its events are not: it is the event that proves.
    ///
    /// # Errors
    /// The code of the work's failure.
    fn stream_query(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<bool>;

    /// Waits on the host until everything queued on the stream is done (`cuStreamSynchronize`).
    ///
    /// # Errors
    /// The code of the work's failure.
    fn stream_synchronize(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<()>;

    /// Has what is queued on the stream from now on wait for the event's last record (`cuStreamWaitEvent`). The host
    /// does not wait.
    ///
    /// # Errors
    /// The driver's code.
    fn stream_wait_event(&self, device: DeviceId, stream: StreamHandle, event: EventHandle) -> DriverResult<()>;

    /// Whether the stream is being captured into a graph (`cuStreamIsCapturing`).
    ///
    /// # Errors
    /// [`CuResult::ERROR_STREAM_CAPTURE_IMPLICIT`] for the legacy stream while a blocking stream of the context is
    /// captured.
    fn stream_capture_status(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<CaptureStatus>;

    /// Sets the calling thread's capture interaction mode and returns the one before
    /// (`cuThreadExchangeStreamCaptureMode`).
    ///
    /// # Errors
    /// The driver's code.
    fn thread_exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode>;

    /// Creates an event without timing (`cuEventCreate`).
    ///
    /// # Errors
    /// The driver's code.
    fn event_create(&self, device: DeviceId) -> DriverResult<EventHandle>;

    /// Destroys an event (`cuEventDestroy`).
    ///
    /// # Errors
    /// The driver's code.
    fn event_destroy(&self, event: EventHandle) -> DriverResult<()>;

    /// Records the event behind what is queued on the stream (`cuEventRecord`). On the legacy stream a record is a barrier
    /// like any other work: blocking streams wait for it. (A wait for an event that is done already is not.)
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_HANDLE`] where stream and event are of different contexts.
    fn event_record(&self, device: DeviceId, event: EventHandle, stream: StreamHandle) -> DriverResult<()>;

    /// Whether the work before the event's last record is done (`cuEventQuery`). An event never recorded is done.
    ///
    /// # Errors
    /// The code of the work's failure.
    fn event_query(&self, event: EventHandle) -> DriverResult<bool>;

    /// Waits on the host for the event's last record (`cuEventSynchronize`).
    ///
    /// # Errors
    /// The code of the work's failure.
    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()>;

    /// Waits on the host for everything queued in the device's context (`cuCtxSynchronize`).
    ///
    /// # Errors
    /// The code of the work's failure.
    fn context_synchronize(&self, device: DeviceId) -> DriverResult<()>;

    // ---- work ----

    /// Queues a copy between two addresses (`cuMemcpyAsync`). The driver takes an address that it does not know for one
    /// of the host's, and may crash on it.
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_VALUE`] for a range that begins in memory and leaves it, or to which access is not set.
    fn memcpy_async(
        &self,
        device: DeviceId,
        destination: DevicePtr,
        source: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> DriverResult<()>;

    /// Copies from the host to the device and waits for it (`cuMemcpyHtoD`).
    ///
    /// # Errors
    /// As [`Driver::memcpy_async`].
    fn memcpy_host_to_device(&self, device: DeviceId, destination: DevicePtr, source: &[u8]) -> DriverResult<()>;

    /// Copies from the device to the host and waits for it (`cuMemcpyDtoH`).
    ///
    /// # Errors
    /// As [`Driver::memcpy_async`].
    fn memcpy_device_to_host(&self, device: DeviceId, destination: &mut [u8], source: DevicePtr) -> DriverResult<()>;

    /// Queues the filling of `bytes` bytes with one value (`cuMemsetD8Async`).
    ///
    /// # Errors
    /// As [`Driver::memcpy_async`].
    fn memset_d8_async(&self, device: DeviceId, address: DevicePtr, value: u8, bytes: u64, stream: StreamHandle) -> DriverResult<()>;

    /// Queues a function of the host behind the stream's work (`cuLaunchHostFunc`). The function may not call the
    /// driver.
    ///
    /// # Errors
    /// The driver's code.
    fn launch_host_function(&self, device: DeviceId, stream: StreamHandle, function: Box<dyn FnOnce() + Send>) -> DriverResult<()>;

    /// Loads a module from PTX text, which a zero byte ends, or from a binary image (`cuModuleLoadData`). It may wait for
    /// the context's queued work.
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_IMAGE`], [`CuResult::ERROR_INVALID_PTX`].
    fn module_load(&self, device: DeviceId, image: &[u8]) -> DriverResult<ModuleHandle>;

    /// Unloads a module (`cuModuleUnload`).
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_HANDLE`].
    fn module_unload(&self, device: DeviceId, module: ModuleHandle) -> DriverResult<()>;

    /// A kernel of a module by its name (`cuModuleGetFunction`).
    ///
    /// # Errors
    /// [`CuResult::ERROR_NOT_FOUND`].
    fn module_function(&self, module: ModuleHandle, name: &str) -> DriverResult<FunctionHandle>;

    /// Queues a kernel (`cuLaunchKernel`). The caller has seen to it that the arguments are what the kernel takes.
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_VALUE`], [`CuResult::ERROR_LAUNCH_OUT_OF_RESOURCES`].
    fn launch_kernel(
        &self,
        device: DeviceId,
        function: FunctionHandle,
        config: LaunchConfig,
        stream: StreamHandle,
        arguments: &[KernelArgument],
    ) -> DriverResult<()>;

    // ---- beside the driver ----

    /// Whether the driver may be called: not any more at process exit, nor in a forked child. No call is made for this, and
    /// it takes no longer than a look at a flag.
    ///
    /// # Errors
    /// The code that every call would answer: [`CuResult::ERROR_DEINITIALIZED`].
    fn alive(&self) -> DriverResult<()> {
        Ok(())
    }

    /// The time that a model says the calls so far would have taken, in nanoseconds, over all threads; `None` where
    /// calls take real time.
    fn modelled_ns(&self) -> Option<u64> {
        None
    }
}

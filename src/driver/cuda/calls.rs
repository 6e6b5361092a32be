//! The trait, call by call.

use super::context::{Bound, check, ordinal};
use super::sys::{self, Functions, attribute};
use super::{CudaDriver, host, process};
use crate::driver::{
    AccessDescriptor, AccessFlags, CaptureMode, CaptureStatus, DeviceProperties, Driver, DriverResult, EventHandle, FunctionHandle,
    Granularity, HandleProperties, HandleTypes, KernelArgument, LaunchConfig, MemoryInfo, MemoryKind, ModuleHandle, PhysicalHandle,
    StreamFlags, StreamHandle,
};
use crate::error::CuResult;
use crate::units::{DeviceId, DevicePtr};
use std::borrow::Cow;
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;

/// Initialises the driver and returns the number of its devices.
///
/// # Errors
/// The call that failed, and its code.
pub(super) fn initialise(functions: &Functions) -> Result<u32, (&'static str, CuResult)> {
    // SAFETY: Initialization, cuInit: may be called at any time, any number of times; the flags must be 0.
    check(unsafe { (functions.init)(0) }).map_err(|code| ("cuInit", code))?;
    device_count(functions).map_err(|code| ("cuDeviceGetCount", code))
}

fn device_count(functions: &Functions) -> DriverResult<u32> {
    let mut count = 0;
    // SAFETY: Device Management, cuDeviceGetCount: the result goes to a local.
    check(unsafe { (functions.device_get_count)(&raw mut count) })?;
    Ok(u32::try_from(count).unwrap_or(0))
}

fn device_attribute(functions: &Functions, device: sys::Device, attribute: c_int) -> DriverResult<c_int> {
    let mut value = 0;
    // SAFETY: Device Management, cuDeviceGetAttribute: the result goes to a local; an attribute unknown to the driver is
    // refused.
    check(unsafe { (functions.device_get_attribute)(&raw mut value, attribute, device) })?;
    Ok(value)
}

/// Whether a device has a capability. A driver that does not know the attribute does not have what it stands for.
fn device_can(functions: &Functions, device: sys::Device, attribute: c_int) -> DriverResult<bool> {
    match device_attribute(functions, device, attribute) {
        Err(CuResult::ERROR_INVALID_VALUE) => Ok(false),
        value => Ok(value? != 0),
    }
}

/// A handle as C's pointer.
fn pointer(handle: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(handle as usize)
}

/// C's pointer as a handle.
fn handle(pointer: *mut c_void) -> u64 {
    pointer.expose_provenance() as u64
}

/// A size as C's `size_t`, which has 64 bits here.
fn size(bytes: u64) -> usize {
    bytes as usize
}

/// The ordinal as C's `int`. A device that there cannot be becomes one that there is not.
fn location(device: DeviceId) -> c_int {
    c_int::try_from(device.0).unwrap_or(c_int::MAX)
}

/// What memory is made for, as C's struct.
fn allocation(properties: &HandleProperties) -> sys::MemAllocationProp {
    // An enumeration of C's takes any bits.
    sys::MemAllocationProp::device(location(properties.device), properties.rdma, properties.shareable.bits() as c_int)
}

/// A function that the driver may lack.
fn optional<T>(function: Option<T>) -> DriverResult<T> {
    function.ok_or(CuResult::ERROR_NOT_SUPPORTED)
}

/// A function of the stream-ordered allocator, of which the driver may lack a part.
fn with_pools<T>(functions: &Functions, function: Option<T>) -> DriverResult<T> {
    optional(function.filter(|_| functions.has_memory_pools()))
}

fn granularity(functions: &Functions, properties: &sys::MemAllocationProp, option: c_int) -> DriverResult<u64> {
    let call = optional(functions.mem_get_allocation_granularity)?;
    let mut bytes = 0;
    // SAFETY: Virtual Memory Management, cuMemGetAllocationGranularity: the properties are a whole struct, and the result goes
    // to a local.
    check(unsafe { call(&raw mut bytes, properties, option) })?;
    Ok(bytes as u64)
}

/// A word whose first four bytes, in the machine's own order, are the value's.
fn first_half(value: u32) -> u64 {
    let [a, b, c, d] = value.to_ne_bytes();
    u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0])
}

/// An image that ends. The driver reads a text up to its zero byte, and a binary as far as its headers say.
fn terminated(image: &[u8]) -> Cow<'_, [u8]> {
    if image.contains(&0) {
        return Cow::Borrowed(image);
    }
    let mut owned = Vec::with_capacity(image.len() + 1);
    owned.extend_from_slice(image);
    owned.push(0);
    Cow::Owned(owned)
}

impl CudaDriver {
    /// The functions, with the device's context current while the second value lives.
    fn on(&self, device: DeviceId) -> DriverResult<(&Functions, Bound<'_>)> {
        let functions = self.functions()?;
        Ok((functions, self.contexts.bind(functions, device)?))
    }

    /// The functions, with some context current, for a call about a handle.
    fn somewhere(&self) -> DriverResult<(&Functions, Bound<'_>)> {
        let functions = self.functions()?;
        Ok((functions, self.contexts.bind_any(functions)?))
    }
}

impl Driver for CudaDriver {
    fn version(&self) -> DriverResult<i32> {
        let functions = self.functions()?;
        let mut version = 0;
        // SAFETY: Version Management, cuDriverGetVersion: the result goes to a local.
        check(unsafe { (functions.driver_get_version)(&raw mut version) })?;
        Ok(version)
    }

    fn device_count(&self) -> DriverResult<u32> {
        device_count(self.functions()?)
    }

    fn device_properties(&self, device: DeviceId) -> DriverResult<DeviceProperties> {
        let functions = self.functions()?;
        let device = ordinal(functions, device)?;
        let mut name = [0; 256];
        // SAFETY: Device Management, cuDeviceGetName: it writes at most the bytes that it is told, a zero byte among them.
        check(unsafe { (functions.device_get_name)(name.as_mut_ptr().cast(), name.len() as c_int, device) })?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy();
        let mut total = 0;
        // SAFETY: Device Management, cuDeviceTotalMem: the result goes to a local.
        check(unsafe { (functions.device_total_mem)(&raw mut total, device) })?;
        let number = |attribute| device_attribute(functions, device, attribute).map(|value| u32::try_from(value).unwrap_or(0));
        let can = |attribute| device_can(functions, device, attribute);
        let shares = |attribute, kind| can(attribute).map(|can| if can { kind } else { HandleTypes::NONE });
        Ok(DeviceProperties {
            compute_capability: (number(attribute::COMPUTE_CAPABILITY_MAJOR)?, number(attribute::COMPUTE_CAPABILITY_MINOR)?),
            virtual_memory_management: functions.has_virtual_memory_management() && can(attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?,
            managed_memory: can(attribute::MANAGED_MEMORY)?,
            memory_pools: functions.has_memory_pools() && can(attribute::MEMORY_POOLS_SUPPORTED)?,
            integrated: can(attribute::INTEGRATED)?,
            stream_ids: functions.stream_get_id.is_some(),
            rdma: can(attribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?,
            shareable: shares(attribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, HandleTypes::FILE_DESCRIPTOR)?
                | shares(attribute::HANDLE_TYPE_FABRIC_SUPPORTED, HandleTypes::FABRIC)?,
            ..DeviceProperties::new(name, total as u64)
        })
    }

    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> DriverResult<bool> {
        let functions = self.functions()?;
        let (device, peer) = (ordinal(functions, device)?, ordinal(functions, peer)?);
        let mut can = 0;
        // SAFETY: Peer Context Memory Access, cuDeviceCanAccessPeer: the result goes to a local.
        check(unsafe { (functions.device_can_access_peer)(&raw mut can, device, peer) })?;
        Ok(can != 0)
    }

    fn memory_info(&self, device: DeviceId) -> DriverResult<MemoryInfo> {
        let (functions, _bound) = self.on(device)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: Memory Management, cuMemGetInfo: a context is current, and the results go to locals.
        check(unsafe { (functions.mem_get_info)(&raw mut free, &raw mut total) })?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }

    fn mem_alloc(&self, device: DeviceId, kind: MemoryKind, bytes: u64) -> DriverResult<DevicePtr> {
        let (functions, _bound) = self.on(device)?;
        let mut address = 0;
        match kind {
            // SAFETY: Memory Management, cuMemAlloc: a context is current, and the result goes to a local.
            MemoryKind::Device => check(unsafe { (functions.mem_alloc)(&raw mut address, size(bytes)) })?,
            MemoryKind::Managed => {
                // SAFETY: Memory Management, cuMemAllocManaged: as for cuMemAlloc.
                check(unsafe { (functions.mem_alloc_managed)(&raw mut address, size(bytes), sys::ATTACH_GLOBAL) })?;
            }
            MemoryKind::Pinned => {
                let mut host = ptr::null_mut();
                // SAFETY: Memory Management, cuMemAllocHost: as for cuMemAlloc. Unified addressing gives devices the same
                // address.
                check(unsafe { (functions.mem_alloc_host)(&raw mut host, size(bytes)) })?;
                address = handle(host);
            }
        }
        Ok(DevicePtr::new(address))
    }

    fn mem_free(&self, device: DeviceId, kind: MemoryKind, address: DevicePtr) -> DriverResult<()> {
        let (functions, _bound) = self.on(device)?;
        check(match kind {
            // SAFETY: Memory Management, cuMemFree: the driver refuses what is not the start of an allocation.
            MemoryKind::Device | MemoryKind::Managed => unsafe { (functions.mem_free)(address.address()) },
            // SAFETY: Memory Management, cuMemFreeHost: likewise.
            MemoryKind::Pinned => unsafe { (functions.mem_free_host)(pointer(address.address())) },
        })
    }

    fn mem_alloc_async(&self, device: DeviceId, bytes: u64, stream: StreamHandle) -> DriverResult<DevicePtr> {
        let (functions, _bound) = self.on(device)?;
        let call = with_pools(functions, functions.mem_alloc_async)?;
        let mut address = 0;
        // SAFETY: Stream Ordered Memory Allocator, cuMemAllocAsync: the caller's stream is live, and the result goes to a
        // local.
        check(unsafe { call(&raw mut address, size(bytes), pointer(stream.0)) })?;
        Ok(DevicePtr::new(address))
    }

    fn mem_free_async(&self, device: DeviceId, address: DevicePtr, stream: StreamHandle) -> DriverResult<()> {
        let (functions, _bound) = self.on(device)?;
        let call = with_pools(functions, functions.mem_free_async)?;
        // SAFETY: Stream Ordered Memory Allocator, cuMemFreeAsync: the caller's stream is live; the driver refuses what is not
        // the start of such an allocation.
        check(unsafe { call(address.address(), pointer(stream.0)) })
    }

    fn mem_pool_threshold(&self, device: DeviceId, bytes: u64) -> DriverResult<()> {
        let functions = self.functions()?;
        let find = with_pools(functions, functions.device_get_default_mem_pool)?;
        let set = with_pools(functions, functions.mem_pool_set_attribute)?;
        let mut pool = ptr::null_mut();
        // SAFETY: Device Management, cuDeviceGetDefaultMemPool: the result goes to a local.
        check(unsafe { find(&raw mut pool, ordinal(functions, device)?) })?;
        let mut bytes = bytes;
        // SAFETY: Stream Ordered Memory Allocator, cuMemPoolSetAttribute: a device's default pool lives as long as the driver;
        // the value of this attribute is a word of 64 bits, read from a local.
        check(unsafe { set(pool, sys::POOL_RELEASE_THRESHOLD, (&raw mut bytes).cast()) })
    }

    fn mem_granularity(&self, properties: &HandleProperties) -> DriverResult<Granularity> {
        let functions = self.functions()?;
        let properties = allocation(properties);
        Ok(Granularity {
            minimum_bytes: granularity(functions, &properties, sys::GRANULARITY_MINIMUM)?,
            recommended_bytes: granularity(functions, &properties, sys::GRANULARITY_RECOMMENDED)?,
        })
    }

    fn mem_address_reserve(&self, bytes: u64, alignment: u64) -> DriverResult<DevicePtr> {
        let call = optional(self.functions()?.mem_address_reserve)?;
        let mut address = 0;
        // SAFETY: Virtual Memory Management, cuMemAddressReserve: the result goes to a local; no address is asked for, and
        // the flags must be 0.
        check(unsafe { call(&raw mut address, size(bytes), size(alignment), 0, 0) })?;
        Ok(DevicePtr::new(address))
    }

    fn mem_address_free(&self, address: DevicePtr, bytes: u64) -> DriverResult<()> {
        let call = optional(self.functions()?.mem_address_free)?;
        // SAFETY: Virtual Memory Management, cuMemAddressFree: the driver refuses what is not a whole reservation.
        check(unsafe { call(address.address(), size(bytes)) })
    }

    fn mem_create(&self, bytes: u64, properties: &HandleProperties) -> DriverResult<PhysicalHandle> {
        let call = optional(self.functions()?.mem_create)?;
        let properties = allocation(properties);
        let mut physical = 0;
        // SAFETY: Virtual Memory Management, cuMemCreate: the properties are a whole struct, the result goes to a local, and
        // the flags must be 0.
        check(unsafe { call(&raw mut physical, size(bytes), &raw const properties, 0) })?;
        Ok(PhysicalHandle(physical))
    }

    fn mem_release(&self, handle: PhysicalHandle) -> DriverResult<()> {
        let call = optional(self.functions()?.mem_release)?;
        // SAFETY: Virtual Memory Management, cuMemRelease: the caller's handle is live, as the trait asks.
        check(unsafe { call(handle.0) })
    }

    fn mem_map(&self, address: DevicePtr, bytes: u64, offset: u64, handle: PhysicalHandle) -> DriverResult<()> {
        let call = optional(self.functions()?.mem_map)?;
        // SAFETY: Virtual Memory Management, cuMemMap: the caller's handle is live, as the trait asks; the driver refuses
        // addresses that are not reserved and free. The flags must be 0.
        check(unsafe { call(address.address(), size(bytes), size(offset), handle.0, 0) })
    }

    fn mem_unmap(&self, address: DevicePtr, bytes: u64) -> DriverResult<()> {
        let call = optional(self.functions()?.mem_unmap)?;
        // SAFETY: Virtual Memory Management, cuMemUnmap: no queued work touches the range, as the trait asks; the driver refuses
        // ranges that are not whole mappings.
        check(unsafe { call(address.address(), size(bytes)) })
    }

    fn mem_set_access(&self, address: DevicePtr, bytes: u64, access: &[AccessDescriptor]) -> DriverResult<()> {
        let call = optional(self.functions()?.mem_set_access)?;
        let access: Vec<sys::MemAccessDesc> = access
            .iter()
            .map(|descriptor| sys::MemAccessDesc {
                location: sys::MemLocation::device(location(descriptor.device)),
                flags: match descriptor.flags {
                    AccessFlags::None => sys::ACCESS_NONE,
                    AccessFlags::Read => sys::ACCESS_READ,
                    AccessFlags::ReadWrite => sys::ACCESS_READ_WRITE,
                },
            })
            .collect();
        // SAFETY: Virtual Memory Management, cuMemSetAccess: as many descriptors as counted; the driver refuses ranges that are
        // not whole mappings.
        check(unsafe { call(address.address(), size(bytes), access.as_ptr(), access.len()) })
    }

    fn stream_create(&self, device: DeviceId, flags: StreamFlags) -> DriverResult<StreamHandle> {
        let (functions, _bound) = self.on(device)?;
        let flags = match flags {
            StreamFlags::Blocking => sys::STREAM_DEFAULT,
            StreamFlags::NonBlocking => sys::STREAM_NON_BLOCKING,
        };
        let mut stream = ptr::null_mut();
        // SAFETY: Stream Management, cuStreamCreate: a context is current, and the result goes to a local.
        check(unsafe { (functions.stream_create)(&raw mut stream, flags) })?;
        Ok(StreamHandle(handle(stream)))
    }

    fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()> {
        let (functions, _bound) = self.somewhere()?;
        // SAFETY: Stream Management, cuStreamDestroy: the caller's stream is live, as the trait asks; the driver refuses its
        // default streams.
        check(unsafe { (functions.stream_destroy)(pointer(stream.0)) })
    }

    fn stream_id(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<u64> {
        let (functions, _bound) = self.on(device)?;
        let call = optional(functions.stream_get_id)?;
        let mut id = 0;
        // SAFETY: Stream Management, cuStreamGetId: the caller's stream is live, and the result goes to a local.
        check(unsafe { call(pointer(stream.0), &raw mut id) })?;
        Ok(id)
    }

    fn stream_query(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<bool> {
        let (functions, _bound) = self.on(device)?;
        // SAFETY: Stream Management, cuStreamQuery: the caller's stream is live.
        done(unsafe { (functions.stream_query)(pointer(stream.0)) })
    }

    fn stream_synchronize(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<()> {
        let (functions, _bound) = self.on(device)?;
        // SAFETY: Stream Management, cuStreamSynchronize: the caller's stream is live.
        check(unsafe { (functions.stream_synchronize)(pointer(stream.0)) })
    }

    fn stream_wait_event(&self, device: DeviceId, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        let (functions, _bound) = self.on(device)?;
        // SAFETY: Stream Management, cuStreamWaitEvent: the caller's stream and event are live; the flags are the default.
        check(unsafe { (functions.stream_wait_event)(pointer(stream.0), pointer(event.0), 0) })
    }

    fn stream_capture_status(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        let (functions, _bound) = self.on(device)?;
        let mut status = sys::CAPTURE_STATUS_NONE;
        // SAFETY: Stream Management, cuStreamIsCapturing: the caller's stream is live, and the result goes to a local.
        check(unsafe { (functions.stream_is_capturing)(pointer(stream.0), &raw mut status) })?;
        match status {
            sys::CAPTURE_STATUS_NONE => Ok(CaptureStatus::None),
            sys::CAPTURE_STATUS_ACTIVE => Ok(CaptureStatus::Active),
            sys::CAPTURE_STATUS_INVALIDATED => Ok(CaptureStatus::Invalidated),
            // A state that is new to this crate: nothing may be assumed.
            _ => Err(CuResult::ERROR_NOT_SUPPORTED),
        }
    }

    fn thread_exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        let functions = self.functions()?;
        let mut mode = match mode {
            CaptureMode::Global => sys::CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => sys::CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => sys::CAPTURE_MODE_RELAXED,
        };
        // SAFETY: Stream Management, cuThreadExchangeStreamCaptureMode: the mode is read from a local and the old one written to
        // it.
        check(unsafe { (functions.thread_exchange_capture_mode)(&raw mut mode) })?;
        match mode {
            sys::CAPTURE_MODE_GLOBAL => Ok(CaptureMode::Global),
            sys::CAPTURE_MODE_THREAD_LOCAL => Ok(CaptureMode::ThreadLocal),
            sys::CAPTURE_MODE_RELAXED => Ok(CaptureMode::Relaxed),
            before => {
                // A mode that is new to this crate could not be handed back: the thread keeps it. A failure's code says as
                // much as the answer.
                let mut before = before;
                // SAFETY: as above.
                check(unsafe { (functions.thread_exchange_capture_mode)(&raw mut before) })?;
                Err(CuResult::ERROR_NOT_SUPPORTED)
            }
        }
    }

    fn event_create(&self, device: DeviceId) -> DriverResult<EventHandle> {
        let (functions, _bound) = self.on(device)?;
        let mut event = ptr::null_mut();
        // SAFETY: Event Management, cuEventCreate: a context is current, and the result goes to a local.
        check(unsafe { (functions.event_create)(&raw mut event, sys::EVENT_DISABLE_TIMING) })?;
        Ok(EventHandle(handle(event)))
    }

    fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        let (functions, _bound) = self.somewhere()?;
        // SAFETY: Event Management, cuEventDestroy: the caller's event is live.
        check(unsafe { (functions.event_destroy)(pointer(event.0)) })
    }

    fn event_record(&self, device: DeviceId, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        let (functions, _bound) = self.on(device)?;
        // SAFETY: Event Management, cuEventRecord: the caller's event and stream are live.
        check(unsafe { (functions.event_record)(pointer(event.0), pointer(stream.0)) })
    }

    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        let (functions, _bound) = self.somewhere()?;
        // SAFETY: Event Management, cuEventQuery: the caller's event is live.
        done(unsafe { (functions.event_query)(pointer(event.0)) })
    }

    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        let (functions, _bound) = self.somewhere()?;
        // SAFETY: Event Management, cuEventSynchronize: the caller's event is live.
        check(unsafe { (functions.event_synchronize)(pointer(event.0)) })
    }

    fn context_synchronize(&self, device: DeviceId) -> DriverResult<()> {
        let (functions, _bound) = self.on(device)?;
        // SAFETY: Context Management, cuCtxSynchronize: a context is current.
        check(unsafe { (functions.ctx_synchronize)() })
    }

    fn memcpy_async(
        &self,
        device: DeviceId,
        destination: DevicePtr,
        source: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let (functions, _bound) = self.on(device)?;
        // SAFETY: Memory Management, cuMemcpyAsync: the caller's addresses are the driver's and its stream is live, as the trait
        // asks.
        check(unsafe { (functions.memcpy_async)(destination.address(), source.address(), size(bytes), pointer(stream.0)) })
    }

    fn memcpy_host_to_device(&self, device: DeviceId, destination: DevicePtr, source: &[u8]) -> DriverResult<()> {
        let (functions, _bound) = self.on(device)?;
        // SAFETY: Memory Management, cuMemcpyHtoD: the slice has these bytes, and the call waits until they are read. The
        // destination is the driver's, as the trait asks.
        check(unsafe { (functions.memcpy_host_to_device)(destination.address(), source.as_ptr().cast(), source.len()) })
    }

    fn memcpy_device_to_host(&self, device: DeviceId, destination: &mut [u8], source: DevicePtr) -> DriverResult<()> {
        let (functions, _bound) = self.on(device)?;
        // SAFETY: Memory Management, cuMemcpyDtoH: the slice has room for these bytes, and the call waits until they are
        // written. The source is the driver's, as the trait asks.
        check(unsafe { (functions.memcpy_device_to_host)(destination.as_mut_ptr().cast(), source.address(), destination.len()) })
    }

    fn memset_d8_async(&self, device: DeviceId, address: DevicePtr, value: u8, bytes: u64, stream: StreamHandle) -> DriverResult<()> {
        let (functions, _bound) = self.on(device)?;
        // SAFETY: Memory Management, cuMemsetD8Async: the caller's address is the driver's and its stream is live, as the trait
        // asks.
        check(unsafe { (functions.memset_d8_async)(address.address(), value, size(bytes), pointer(stream.0)) })
    }

    fn launch_host_function(&self, device: DeviceId, stream: StreamHandle, function: Box<dyn FnOnce() + Send>) -> DriverResult<()> {
        let (functions, _bound) = self.on(device)?;
        let data = host::into_data(function);
        // SAFETY: Execution Control, cuLaunchHostFunc: the function takes this data, and is called at most once for it, also
        // on another thread, which the closure allows. (Where the context breaks first it is not called, and the closure
        // leaks.)
        let result = check(unsafe { (functions.launch_host_func)(pointer(stream.0), host::run, data) });
        if result.is_err() {
            // SAFETY: the call failed, and so has no effect: nobody else has the data.
            drop(unsafe { host::from_data(data) });
        }
        result
    }

    fn module_load(&self, device: DeviceId, image: &[u8]) -> DriverResult<ModuleHandle> {
        let (functions, _bound) = self.on(device)?;
        let image = terminated(image);
        let mut module = ptr::null_mut();
        // SAFETY: Module Management, cuModuleLoadData: a text ends with a zero byte, a binary where its own headers say, which
        // the caller answers for; the result goes to a local.
        check(unsafe { (functions.module_load_data)(&raw mut module, image.as_ptr().cast()) })?;
        Ok(ModuleHandle(handle(module)))
    }

    fn module_unload(&self, device: DeviceId, module: ModuleHandle) -> DriverResult<()> {
        let (functions, _bound) = self.on(device)?;
        // SAFETY: Module Management, cuModuleUnload: the caller's module is live.
        check(unsafe { (functions.module_unload)(pointer(module.0)) })
    }

    fn module_function(&self, module: ModuleHandle, name: &str) -> DriverResult<FunctionHandle> {
        // A kernel's name has no zero byte.
        let name = CString::new(name).map_err(|_| CuResult::ERROR_NOT_FOUND)?;
        let (functions, _bound) = self.somewhere()?;
        let mut function = ptr::null_mut();
        // SAFETY: Module Management, cuModuleGetFunction: the caller's module is live, the name is a C string, and the result
        // goes to a local.
        check(unsafe { (functions.module_get_function)(&raw mut function, pointer(module.0), name.as_ptr()) })?;
        Ok(FunctionHandle(handle(function)))
    }

    fn launch_kernel(
        &self,
        device: DeviceId,
        function: FunctionHandle,
        config: LaunchConfig,
        stream: StreamHandle,
        arguments: &[KernelArgument],
    ) -> DriverResult<()> {
        let (functions, _bound) = self.on(device)?;
        // Each argument is the first bytes of a word.
        let mut words: Vec<u64> = arguments
            .iter()
            .map(|argument| match *argument {
                KernelArgument::Pointer(address) => address.address(),
                KernelArgument::U64(value) => value,
                KernelArgument::U32(value) => first_half(value),
            })
            .collect();
        let mut pointers: Vec<*mut c_void> = words.iter_mut().map(|word| (&raw mut *word).cast()).collect();
        let LaunchConfig { grid, block, shared_bytes } = config;
        // SAFETY: Execution Control, cuLaunchKernel: the arguments are what the kernel takes, as the trait asks; the driver
        // copies them before it returns. The caller's function and stream are live.
        check(unsafe {
            (functions.launch_kernel)(
                pointer(function.0),
                grid[0],
                grid[1],
                grid[2],
                block[0],
                block[1],
                block[2],
                shared_bytes,
                pointer(stream.0),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }

    fn alive(&self) -> DriverResult<()> {
        process::running()
    }
}

/// What a query answers.
fn done(code: CuResult) -> DriverResult<bool> {
    match code {
        CuResult::ERROR_NOT_READY => Ok(false),
        code => check(code).map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_end_with_a_zero_byte() {
        assert_eq!(*terminated(b""), *b"\0");
        assert_eq!(*terminated(b"text"), *b"text\0");
        assert!(matches!(terminated(b"text\0"), Cow::Borrowed(b"text\0")));
        assert!(matches!(terminated(b"\x7fELF\0rest"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_narrow_argument_stands_first_in_its_word() {
        assert_eq!(first_half(0x0102_0304).to_ne_bytes()[..4], 0x0102_0304_u32.to_ne_bytes());
    }

    #[test]
    fn a_query_tells_done_from_failed() {
        assert_eq!(done(CuResult::SUCCESS), Ok(true));
        assert_eq!(done(CuResult::ERROR_NOT_READY), Ok(false));
        assert_eq!(done(CuResult(1234)), Err(CuResult(1234)));
    }

    #[test]
    fn handles_survive_the_way_through_pointers() {
        for value in [0, 1, 2, 0x7fff_1234_5678, u64::MAX] {
            assert_eq!(handle(pointer(value)), value);
        }
        assert_eq!(location(DeviceId(3)), 3);
        assert_eq!(location(DeviceId(u32::MAX)), c_int::MAX);
    }
}

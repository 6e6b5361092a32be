//! The driver layer's own count: what was called, how long it took, and how much memory is held.

use super::types::{
    AccessDescriptor, CaptureMode, CaptureStatus, DeviceProperties, EventHandle, FunctionHandle, Granularity, HandleProperties,
    KernelArgument, LaunchConfig, MemoryInfo, MemoryKind, ModuleHandle, PhysicalHandle, StreamFlags, StreamHandle,
};
use super::{Call, Driver, DriverResult};
use crate::sync::{Arc, AtomicU64, Mutex, MutexGuard, Ordering};
use crate::units::{DeviceId, DevicePtr};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Instant;

const CALLS: usize = Call::ALL.len();

/// An adaptor round any driver that counts its calls, their time, and the physical memory held through it.
///
/// The count is of what the driver was asked for, whoever asked: it stands below the pool and knows nothing of blocks.
///
/// # Counting law
/// `reserved_bytes` = the sizes of the allocations not freed, plain or in the order of a stream + the sizes of the handles that are either not
/// released or still mapped. A byte counts from the return of the call that took it to the return of the call that
/// gave it back, so under concurrency the peak is never too low.
pub struct Meter {
    driver: Arc<dyn Driver>,
    calls: [AtomicU64; CALLS],
    wall_ns: AtomicU64,
    held: Mutex<Held>,
}

/// How often each call was made, at one moment.
#[derive(Clone, PartialEq, Eq)]
pub struct CallCounts([u64; CALLS]);

/// Physical memory by what it was taken with.
#[derive(Default)]
struct Held {
    current_bytes: u64,
    peak_bytes: u64,
    /// Plain allocations by address: bytes.
    plain: HashMap<DevicePtr, u64>,
    /// Live handles, by value: the key in `physical`. The driver may give a released value again.
    handles: HashMap<PhysicalHandle, u64>,
    physical: HashMap<u64, Physical>,
    next_physical: u64,
    /// Mappings by address: the key in `physical`.
    mappings: BTreeMap<DevicePtr, u64>,
}

struct Physical {
    bytes: u64,
    /// Mappings, and one more while the handle is not released.
    references: u64,
}

impl Held {
    fn add(&mut self, bytes: u64) {
        self.current_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.current_bytes);
    }

    fn unreference(&mut self, key: u64) {
        let Some(physical) = self.physical.get_mut(&key) else { return };
        physical.references -= 1;
        if physical.references == 0 {
            self.current_bytes -= physical.bytes;
            self.physical.remove(&key);
        }
    }
}

impl Meter {
    /// Counts the calls to `driver` that go through the new adaptor.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver, calls: [const { AtomicU64::new(0) }; CALLS], wall_ns: AtomicU64::new(0), held: Mutex::new(Held::default()) }
    }

    /// The driver below.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// How often each call was made so far.
    #[must_use]
    pub fn counts(&self) -> CallCounts {
        // Relaxed: a counter on its own; a snapshot taken while calls are made is of no exact moment.
        CallCounts(std::array::from_fn(|i| self.calls[i].load(Ordering::Relaxed)))
    }

    /// Physical bytes held from the driver at this moment, over all devices and kinds; 0 where the driver has ended, as
    /// [`Driver::alive`] says.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.held().map_or(0, |held| held.current_bytes)
    }

    /// The most that [`Meter::reserved_bytes`] has been since the start or the last [`Meter::reset_peak`].
    #[must_use]
    pub fn peak_reserved_bytes(&self) -> u64 {
        self.held().map_or(0, |held| held.peak_bytes)
    }

    /// Begins a new peak at the bytes held now.
    pub fn reset_peak(&self) {
        if let Ok(mut held) = self.held() {
            held.peak_bytes = held.current_bytes;
        }
    }

    /// The time spent inside the driver's calls, in nanoseconds, summed over threads. On a simulated device this is the
    /// simulation's own time; [`Driver::modelled_ns`] is what the calls would have cost.
    #[must_use]
    pub fn wall_ns(&self) -> u64 {
        // Relaxed: as in `counts`.
        self.wall_ns.load(Ordering::Relaxed)
    }

    /// What is held, while the driver is there: in a forked child a thread that is not there may have the lock.
    fn held(&self) -> DriverResult<MutexGuard<'_, Held>> {
        self.driver.alive().map(|()| self.held.lock())
    }

    /// Books an allocation.
    fn took(&self, address: DevicePtr, bytes: u64) {
        let mut held = self.held.lock();
        held.plain.insert(address, bytes);
        held.add(bytes);
    }

    /// Frees an allocation, and books that.
    fn giving(&self, address: DevicePtr, free: impl FnOnce() -> DriverResult<()>) -> DriverResult<()> {
        let bytes = self.held()?.plain.remove(&address);
        let result = free();
        if let Some(bytes) = bytes {
            let mut held = self.held.lock();
            match result {
                Ok(()) => held.current_bytes -= bytes,
                Err(_) => _ = held.plain.insert(address, bytes),
            }
        }
        result
    }

    fn timed<T>(&self, call: Call, work: impl FnOnce(&dyn Driver) -> T) -> T {
        // Relaxed: as in `counts`.
        self.calls[call as usize].fetch_add(1, Ordering::Relaxed);
        let start = Instant::now();
        let result = work(&*self.driver);
        let ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.wall_ns.fetch_add(ns, Ordering::Relaxed);
        result
    }
}

/// Writes methods that count, time and pass on.
macro_rules! forward {
    ($($call:ident: fn $name:ident(&self $(, $argument:ident: $type:ty)* $(,)?) -> $result:ty;)*) => {
        $(
            fn $name(&self $(, $argument: $type)*) -> DriverResult<$result> {
                self.timed(Call::$call, |driver| driver.$name($($argument),*))
            }
        )*
    };
}

impl Driver for Meter {
    forward! {
        Version: fn version(&self) -> i32;
        DeviceCount: fn device_count(&self) -> u32;
        DeviceProperties: fn device_properties(&self, device: DeviceId) -> DeviceProperties;
        CanAccessPeer: fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> bool;
        MemoryInfo: fn memory_info(&self, device: DeviceId) -> MemoryInfo;
        MemGranularity: fn mem_granularity(&self, properties: &HandleProperties) -> Granularity;
        MemAddressReserve: fn mem_address_reserve(&self, bytes: u64, alignment: u64) -> DevicePtr;
        MemAddressFree: fn mem_address_free(&self, address: DevicePtr, bytes: u64) -> ();
        MemPoolThreshold: fn mem_pool_threshold(&self, device: DeviceId, bytes: u64) -> ();
        MemSetAccess: fn mem_set_access(&self, address: DevicePtr, bytes: u64, access: &[AccessDescriptor]) -> ();
        StreamCreate: fn stream_create(&self, device: DeviceId, flags: StreamFlags) -> StreamHandle;
        StreamDestroy: fn stream_destroy(&self, stream: StreamHandle) -> ();
        StreamId: fn stream_id(&self, device: DeviceId, stream: StreamHandle) -> u64;
        StreamQuery: fn stream_query(&self, device: DeviceId, stream: StreamHandle) -> bool;
        StreamSynchronize: fn stream_synchronize(&self, device: DeviceId, stream: StreamHandle) -> ();
        StreamWaitEvent: fn stream_wait_event(&self, device: DeviceId, stream: StreamHandle, event: EventHandle) -> ();
        StreamCaptureStatus: fn stream_capture_status(&self, device: DeviceId, stream: StreamHandle) -> CaptureStatus;
        ThreadExchangeCaptureMode: fn thread_exchange_capture_mode(&self, mode: CaptureMode) -> CaptureMode;
        EventCreate: fn event_create(&self, device: DeviceId) -> EventHandle;
        EventDestroy: fn event_destroy(&self, event: EventHandle) -> ();
        EventRecord: fn event_record(&self, device: DeviceId, event: EventHandle, stream: StreamHandle) -> ();
        EventQuery: fn event_query(&self, event: EventHandle) -> bool;
        EventSynchronize: fn event_synchronize(&self, event: EventHandle) -> ();
        ContextSynchronize: fn context_synchronize(&self, device: DeviceId) -> ();
        MemcpyAsync: fn memcpy_async(
            &self,
            device: DeviceId,
            destination: DevicePtr,
            source: DevicePtr,
            bytes: u64,
            stream: StreamHandle,
        ) -> ();
        MemcpyHostToDevice: fn memcpy_host_to_device(&self, device: DeviceId, destination: DevicePtr, source: &[u8]) -> ();
        MemcpyDeviceToHost: fn memcpy_device_to_host(&self, device: DeviceId, destination: &mut [u8], source: DevicePtr) -> ();
        MemsetD8Async: fn memset_d8_async(
            &self,
            device: DeviceId,
            address: DevicePtr,
            value: u8,
            bytes: u64,
            stream: StreamHandle,
        ) -> ();
        LaunchHostFunction: fn launch_host_function(
            &self,
            device: DeviceId,
            stream: StreamHandle,
            function: Box<dyn FnOnce() + Send>,
        ) -> ();
        ModuleLoad: fn module_load(&self, device: DeviceId, image: &[u8]) -> ModuleHandle;
        ModuleUnload: fn module_unload(&self, device: DeviceId, module: ModuleHandle) -> ();
        ModuleFunction: fn module_function(&self, module: ModuleHandle, name: &str) -> FunctionHandle;
        LaunchKernel: fn launch_kernel(
            &self,
            device: DeviceId,
            function: FunctionHandle,
            config: LaunchConfig,
            stream: StreamHandle,
            arguments: &[KernelArgument],
        ) -> ();
    }

    fn mem_alloc(&self, device: DeviceId, kind: MemoryKind, bytes: u64) -> DriverResult<DevicePtr> {
        let address = self.timed(Call::allocates(kind), |driver| driver.mem_alloc(device, kind, bytes))?;
        self.took(address, bytes);
        Ok(address)
    }

    fn mem_alloc_async(&self, device: DeviceId, bytes: u64, stream: StreamHandle) -> DriverResult<DevicePtr> {
        let address = self.timed(Call::MemAllocAsync, |driver| driver.mem_alloc_async(device, bytes, stream))?;
        self.took(address, bytes);
        Ok(address)
    }

    // What gives memory back takes its entry out before the call, since the driver may hand the same address or handle
    // to another thread before the call returns; the entry comes back where the driver refuses.

    fn mem_free(&self, device: DeviceId, kind: MemoryKind, address: DevicePtr) -> DriverResult<()> {
        self.giving(address, || self.timed(Call::frees(kind), |driver| driver.mem_free(device, kind, address)))
    }

    fn mem_free_async(&self, device: DeviceId, address: DevicePtr, stream: StreamHandle) -> DriverResult<()> {
        self.giving(address, || self.timed(Call::MemFreeAsync, |driver| driver.mem_free_async(device, address, stream)))
    }

    fn mem_create(&self, bytes: u64, properties: &HandleProperties) -> DriverResult<PhysicalHandle> {
        let handle = self.timed(Call::MemCreate, |driver| driver.mem_create(bytes, properties))?;
        let mut held = self.held.lock();
        let key = held.next_physical;
        held.next_physical += 1;
        held.physical.insert(key, Physical { bytes, references: 1 });
        held.handles.insert(handle, key);
        held.add(bytes);
        Ok(handle)
    }

    fn mem_release(&self, handle: PhysicalHandle) -> DriverResult<()> {
        let key = self.held()?.handles.remove(&handle);
        let result = self.timed(Call::MemRelease, |driver| driver.mem_release(handle));
        if let Some(key) = key {
            let mut held = self.held.lock();
            match result {
                Ok(()) => held.unreference(key),
                Err(_) => _ = held.handles.insert(handle, key),
            }
        }
        result
    }

    fn mem_map(&self, address: DevicePtr, bytes: u64, offset: u64, handle: PhysicalHandle) -> DriverResult<()> {
        self.timed(Call::MemMap, |driver| driver.mem_map(address, bytes, offset, handle))?;
        let mut held = self.held.lock();
        if let Some(&key) = held.handles.get(&handle) {
            if let Some(physical) = held.physical.get_mut(&key) {
                physical.references += 1;
            }
            held.mappings.insert(address, key);
        }
        Ok(())
    }

    fn mem_unmap(&self, address: DevicePtr, bytes: u64) -> DriverResult<()> {
        let end = DevicePtr::new(address.address().saturating_add(bytes));
        let mut taken = Vec::new();
        {
            let mut held = self.held()?;
            while let Some((&at, &key)) = held.mappings.range(address..end).next() {
                held.mappings.remove(&at);
                taken.push((at, key));
            }
        }
        let result = self.timed(Call::MemUnmap, |driver| driver.mem_unmap(address, bytes));
        let mut held = self.held.lock();
        for (at, key) in taken {
            match result {
                Ok(()) => held.unreference(key),
                Err(_) => _ = held.mappings.insert(at, key),
            }
        }
        result
    }

    fn alive(&self) -> DriverResult<()> {
        self.driver.alive()
    }

    fn modelled_ns(&self) -> Option<u64> {
        self.driver.modelled_ns()
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("driver", &self.driver).field("reserved_bytes", &self.reserved_bytes()).finish_non_exhaustive()
    }
}

impl CallCounts {
    /// How often one call was made.
    #[must_use]
    pub const fn get(&self, call: Call) -> u64 {
        self.0[call as usize]
    }

    /// The calls made since an earlier snapshot of the same meter.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].saturating_sub(earlier.0[i])))
    }

    /// How many calls there were in all.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// How many calls there were that [manage memory](Call::manages_memory).
    #[must_use]
    pub fn memory_calls(&self) -> u64 {
        Call::ALL.iter().filter(|call| call.manages_memory()).map(|&call| self.get(call)).sum()
    }

    /// The counts that are not zero, by CUDA function, in the order of the trait. All calls of streams, events and
    /// contexts are one last entry, `sync`.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let sync = Call::ALL.iter().filter(|call| call.synchronizes()).map(|&call| self.get(call)).sum();
        Call::ALL
            .iter()
            .filter(|call| !call.synchronizes())
            .map(|&call| (call.name(), self.get(call)))
            .chain(std::iter::once(("sync", sync)))
            .filter(|&(_, count)| count > 0)
    }
}

impl Default for CallCounts {
    fn default() -> Self {
        Self([0; CALLS])
    }
}

impl fmt::Debug for CallCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::driver::sim::{SimConfig, SimDriver};
    use crate::error::CuResult;
    use crate::units::MIB;

    const PAGE: u64 = 2 * MIB;
    const DEVICE: DeviceId = DeviceId(0);

    fn metered() -> (Arc<SimDriver>, Meter) {
        let driver = SimDriver::new(SimConfig::default().capacity(64 * MIB).multi_unmap(true));
        (Arc::clone(&driver), Meter::new(driver))
    }

    #[test]
    fn a_handle_counts_until_it_is_both_released_and_unmapped() {
        let (driver, meter) = metered();
        let at = meter.mem_address_reserve(4 * PAGE, 0).unwrap();
        let handle = meter.mem_create(PAGE, &HandleProperties::on(DEVICE)).unwrap();
        meter.mem_map(at, PAGE, 0, handle).unwrap();
        meter.mem_map(at.offset(PAGE), PAGE, 0, handle).unwrap();
        meter.mem_release(handle).unwrap();
        // The released value may name new memory, which has nothing to do with the old.
        let next = meter.mem_create(2 * PAGE, &HandleProperties::on(DEVICE)).unwrap();
        assert_eq!(meter.reserved_bytes(), 3 * PAGE);
        meter.mem_unmap(at, PAGE).unwrap();
        assert_eq!(meter.reserved_bytes(), 3 * PAGE);
        meter.mem_unmap(at, 2 * PAGE).unwrap();
        assert_eq!(meter.reserved_bytes(), 2 * PAGE);
        meter.mem_release(next).unwrap();
        assert_eq!((meter.reserved_bytes(), meter.peak_reserved_bytes()), (0, 3 * PAGE));
        assert_eq!(driver.held_bytes(DEVICE), 0);
        meter.reset_peak();
        assert_eq!(meter.peak_reserved_bytes(), 0);
    }

    #[test]
    fn what_the_driver_refuses_changes_no_count_of_memory() {
        let (driver, meter) = metered();
        let code = CuResult::ERROR_UNKNOWN;
        let at = meter.mem_address_reserve(PAGE, 0).unwrap();
        let handle = meter.mem_create(PAGE, &HandleProperties::on(DEVICE)).unwrap();
        meter.mem_map(at, PAGE, 0, handle).unwrap();
        let plain = meter.mem_alloc(DEVICE, MemoryKind::Pinned, 100).unwrap();
        for call in [Call::MemCreate, Call::MemRelease, Call::MemMap, Call::MemUnmap, Call::MemAlloc, Call::MemFreeHost] {
            driver.fail(call, 0, code);
        }
        assert_eq!(meter.mem_create(PAGE, &HandleProperties::on(DEVICE)), Err(code));
        assert_eq!(meter.mem_map(at, PAGE, 0, handle), Err(code));
        assert_eq!(meter.mem_unmap(at, PAGE), Err(code));
        assert_eq!(meter.mem_release(handle), Err(code));
        assert_eq!(meter.mem_alloc(DEVICE, MemoryKind::Device, 1), Err(code));
        assert_eq!(meter.mem_free(DEVICE, MemoryKind::Pinned, plain), Err(code));
        assert_eq!(meter.reserved_bytes(), PAGE + 100);
        meter.mem_free(DEVICE, MemoryKind::Pinned, plain).unwrap();
        meter.mem_release(handle).unwrap();
        assert_eq!(meter.reserved_bytes(), PAGE);
        meter.mem_unmap(at, PAGE).unwrap();
        assert_eq!(meter.reserved_bytes(), 0);
    }

    #[test]
    fn counts_go_by_name_and_synchronization_is_one_entry() {
        let (_, meter) = metered();
        let event = meter.event_create(DEVICE).unwrap();
        meter.event_record(DEVICE, event, StreamHandle::LEGACY).unwrap();
        let before = meter.counts();
        meter.event_destroy(event).unwrap();
        meter.context_synchronize(DEVICE).unwrap();
        meter.memory_info(DEVICE).unwrap();
        assert!(meter.mem_alloc(DEVICE, MemoryKind::Managed, 0).is_err());
        let since = meter.counts().since(&before);
        let named: Vec<_> = since.iter().collect();
        assert_eq!(named, [("cuMemGetInfo", 1), ("cuMemAllocManaged", 1), ("sync", 2)]);
        assert_eq!((since.get(Call::EventDestroy), since.total(), since.memory_calls()), (1, 4, 1));
        assert_eq!(meter.counts().total(), 6);
        assert_eq!(CallCounts::default().iter().count(), 0);
    }
}

//! The **simulated device**: a driver that obeys CUDA's rules, without a GPU.
//!
//! It hands out addresses, handles, streams and events, and it refuses what CUDA refuses, with CUDA's codes. By default
//! no memory stands behind the addresses, so traces of any size run; where bytes matter a machine is
//! [backed](SimConfig::backed).
//!
//! # Whose rules
//! The codes, and what is allowed at all, are those seen on an H200 with driver 580 (CUDA 13.0), by provoking each; the
//! conformance suite (`driver::conformance`, feature `testing`) holds them. Where a driver is more lenient than
//! [`Driver`] lets its callers be, the simulation is strict: it refuses an unmap of several mappings, of holes or of
//! nothing (but for [`SimConfig::multi_unmap`]), a mapping that reaches past the end of its reservation, plain memory
//! freed as another kind or through another device, memory allocated in the order of a stream freed as plain memory or the
//! other way round, and a stream named together with a device that is not its own. It
//! counts a plain allocation at the size asked for; the driver takes 2 MiB at a time.
//!
//! A device that lacks a kind of handle refuses to make one with [`CuResult::ERROR_NOT_SUPPORTED`]: a guess, as an H200 has
//! all of them. Fabric handles it has, and refused with [`CuResult::ERROR_NOT_PERMITTED`]
//! ([`SimConfig::fabric_permitted`]).
//!
//! A broken context refuses everything but virtual memory management, which belongs to no context, and questions about
//! the machine.
//!
//! # Where the hardware's behaviour is undefined
//! The simulation ends the test with a panic that says what was done. These are: memory unmapped, freed by another
//! device, or freed in the order of another stream, while queued work touches it; a call with a stream, event or handle of physical memory that is not live (the
//! driver crashes; releasing a handle twice it happened to refuse); and an asynchronous copy from or to an address where
//! nothing is (it takes it for an address of the host, and crashes). A *kernel* that touches what it may not breaks its
//! context, as on a GPU.
//!
//! # Backed machines
//! [`SimConfig::backed`] puts memory behind the addresses: copies, fills and the [built-in kernels](BUILTIN_MODULE)
//! work, bytes move with the handle that they are in, and addresses are real ones of this process. Fresh memory is zero.
//! At most 16,000 handles are mapped at a time, and at most 8 times the memory is reserved; beyond that memory is out.
//! On other machines copies, fills and kernels are checked and move nothing, and copying to the host is
//! [not supported](CuResult::ERROR_NOT_SUPPORTED).
//!
//! # Streams
//! Work is done within the call that queues it, unless its stream is [stalled](SimDriver::stall) or it waits for one
//! that is. A host call that waits for such work blocks until another thread lets it go on. Freeing plain memory, and
//! loading or unloading a module, wait for everything queued in the context, as was seen; mapping, unmapping and
//! allocating do not. An operation on the legacy stream, the record of an event too, waits for the blocking streams and
//! they for it; a wait for an event that is done already is no operation.
//!
//! # Concurrency
//! One lock round everything. Hooks and host functions run without it. A call takes well under a microsecond and is at most
//! logarithmic in what is alive, but for the mappings it spans and the streams that have work queued. A forked child should
//! leave it alone: it does not end there as the CUDA driver does, and another thread may have held the lock.
//!
//! # What it does not do
//! Streams run at once or not at all: there is no schedule and no time. Nothing is captured. A memory pool keeps nothing of
//! what is freed, whatever its threshold.

mod audit;
#[allow(unsafe_code)] // Memory mappings of the host stand behind a backed device.
mod backing;
mod config;
mod cost;
mod faults;
mod kernels;
mod memory;
mod ordered;
mod space;
mod streams;
mod vmm;

pub use super::kernels::{BUILTIN_MODULE, pattern};
pub use audit::Piece;
pub use config::{MAX_DEVICES, PlainPlacement, SimConfig, SimDevice};
pub use faults::FaultTarget;

use super::{
    AccessDescriptor, Call, CaptureMode, CaptureStatus, DeviceProperties, Driver, DriverResult, EventHandle, FunctionHandle, Granularity,
    HandleProperties, KernelArgument, LaunchConfig, MemoryInfo, MemoryKind, ModuleHandle, PhysicalHandle, StreamFlags, StreamHandle,
};
use crate::error::CuResult;
use crate::sync::{Arc, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, ThreadId, current_thread};
use crate::units::{DeviceId, DevicePtr};
use faults::{Faults, Outcome};
use std::collections::HashMap;
use std::fmt;
use streams::Work;

/// A simulated machine. See the [module's documentation](self).
pub struct SimDriver {
    state: Mutex<State>,
    /// Work was done, or a context broke.
    changed: Condvar,
    faults: Faults,
    modelled_ns: AtomicU64,
}

/// Everything under the lock.
struct State {
    config: SimConfig,
    devices: Vec<memory::Device>,
    plain: memory::Plain,
    vmm: vmm::Vmm,
    queues: streams::Queues,
    modules: kernels::Modules,
    /// The memory of a backed machine.
    backing: Option<backing::Backing>,
    /// Capture modes of threads that are not in the default one.
    capture_modes: HashMap<ThreadId, CaptureMode>,
}

/// Ends the test: on a GPU anything may happen here, and some of it was seen to end the process.
#[cold]
#[inline(never)]
fn undefined(what: fmt::Arguments<'_>) -> ! {
    panic!("undefined behaviour: {what}");
}

impl SimDriver {
    /// A machine made as `config` says.
    ///
    /// # Panics
    /// When the configuration makes no sense: more than [`MAX_DEVICES`] devices, or a granularity that is not a power
    /// of two of at least 4 KiB (64 KiB for a backed machine), or where the host has no memory files or addresses for a
    /// backed machine.
    #[must_use]
    pub fn new(config: SimConfig) -> Arc<Self> {
        assert!(config.devices.len() <= MAX_DEVICES, "at most {MAX_DEVICES} simulated devices");
        for device in &config.devices {
            let granularity = device.granularity.minimum_bytes;
            let least = if config.backed { 64 << 10 } else { 4096 };
            assert!(granularity.is_power_of_two() && granularity >= least, "granularity {granularity} of a simulated device");
        }
        let capacities: Vec<u64> = config.devices.iter().map(|device| device.properties.total_bytes).collect();
        let backing =
            config.backed.then(|| backing::Backing::new(&capacities).expect("memory files and addresses for a backed simulated machine"));
        let plain = backing.as_ref().map_or((memory::PLAIN_START, memory::PLAIN_BYTES), backing::Backing::plain_region);
        let state = State {
            devices: config.devices.iter().map(|_| memory::Device::default()).collect(),
            plain: memory::Plain::new(plain),
            vmm: vmm::Vmm::new(config.reuse_handles),
            queues: streams::Queues::new(config.devices.len(), config.reuse_handles),
            modules: kernels::Modules::new(config.reuse_handles),
            backing,
            capture_modes: HashMap::new(),
            config,
        };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new(), faults: Faults::new(), modelled_ns: AtomicU64::new(0) })
    }

    /// One device like an H200: 140 GiB, granularity 2 MiB.
    #[must_use]
    pub fn h200() -> Arc<Self> {
        Self::new(SimConfig::default())
    }

    /// Has the `k`-th call from now on that `target` covers (0: the next) fail with `code`, before it does anything.
    /// Any number of faults may be planned; each strikes once.
    pub fn fail(&self, target: impl Into<FaultTarget>, k: u64, code: CuResult) {
        self.faults.plan(target.into(), k, Outcome::Fail(code));
    }

    /// Has the `k`-th call from now on that `target` covers panic, before it does anything.
    pub fn panic_at(&self, target: impl Into<FaultTarget>, k: u64) {
        self.faults.plan(target.into(), k, Outcome::Panic);
    }

    /// Takes back every fault that has not struck.
    pub fn clear_faults(&self) {
        self.faults.clear();
    }

    /// How many planned faults have not struck yet.
    #[must_use]
    pub fn faults_planned(&self) -> usize {
        self.faults.planned()
    }

    /// Runs `hook` at the begin of every call, before it does anything and with no lock held: it may itself call the
    /// driver, but should then not do so without end.
    pub fn set_hook(&self, hook: impl Fn(Call) + Send + Sync + 'static) {
        self.faults.set_hook(Some(Arc::new(hook)));
    }

    /// Takes the hook away.
    pub fn clear_hook(&self) {
        self.faults.set_hook(None);
    }

    /// How many calls that `target` covers were made so far, the failed ones too.
    #[must_use]
    pub fn calls(&self, target: impl Into<FaultTarget>) -> u64 {
        self.faults.count(target.into())
    }

    /// Breaks a device's context: every later call on it returns `code`, as after a failed kernel.
    pub fn poison(&self, device: DeviceId, code: CuResult) {
        if let Some(device) = self.state.lock().devices.get_mut(device.0 as usize) {
            device.sticky = Some(code);
        }
        self.changed.notify_all();
    }

    fn enter(&self, call: Call) -> DriverResult<()> {
        self.faults.enter(call)?;
        if streams::calls_permitted() { Ok(()) } else { Err(CuResult::ERROR_NOT_PERMITTED) }
    }

    fn spend(&self, ns: u64) {
        // Relaxed: a counter on its own.
        self.modelled_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// A call of memory management: the work and its modelled time.
    fn priced<T>(&self, call: Call, work: impl FnOnce(&mut State) -> DriverResult<(T, u64)>) -> DriverResult<T> {
        self.enter(call)?;
        let (value, ns) = work(&mut self.state.lock())?;
        self.spend(ns);
        Ok(value)
    }

    /// The state once everything queued in a device's context is done.
    fn synchronized(&self, device: DeviceId) -> DriverResult<MutexGuard<'_, State>> {
        let state = self.state.lock();
        let index = state.device(device)?;
        self.wait_context(state, index)
    }

    /// A call of streams and events, at a fixed price.
    fn fixed<T>(&self, call: Call, ns: u64, work: impl FnOnce() -> DriverResult<T>) -> DriverResult<T> {
        self.enter(call)?;
        self.spend(ns);
        work()
    }
}

impl Driver for SimDriver {
    fn version(&self) -> DriverResult<i32> {
        self.fixed(Call::Version, 0, || Ok(self.state.lock().config.version))
    }

    fn device_count(&self) -> DriverResult<u32> {
        self.fixed(Call::DeviceCount, 0, || Ok(self.state.lock().devices.len() as u32))
    }

    fn device_properties(&self, device: DeviceId) -> DriverResult<DeviceProperties> {
        self.fixed(Call::DeviceProperties, 0, || {
            let state = self.state.lock();
            let device = state.config.devices.get(device.0 as usize).ok_or(CuResult::ERROR_INVALID_DEVICE)?;
            Ok(device.properties.clone())
        })
    }

    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> DriverResult<bool> {
        self.fixed(Call::CanAccessPeer, 0, || {
            let state = self.state.lock();
            let count = state.devices.len() as u32;
            if device.0 >= count || peer.0 >= count {
                return Err(CuResult::ERROR_INVALID_DEVICE);
            }
            Ok(state.config.can_access_peer(device.0 as usize, peer.0 as usize))
        })
    }

    fn memory_info(&self, device: DeviceId) -> DriverResult<MemoryInfo> {
        self.fixed(Call::MemoryInfo, cost::MEMORY_INFO, || {
            let state = self.state.lock();
            let index = state.device(device)?;
            let config = &state.config.devices[index];
            let total_bytes = config.properties.total_bytes;
            let used = config.other_process_bytes.saturating_add(state.devices[index].held_bytes);
            Ok(MemoryInfo { free_bytes: total_bytes.saturating_sub(used), total_bytes })
        })
    }

    fn mem_alloc(&self, device: DeviceId, kind: MemoryKind, bytes: u64) -> DriverResult<DevicePtr> {
        self.priced(Call::allocates(kind), |state| state.mem_alloc(device, kind, bytes))
    }

    fn mem_free(&self, device: DeviceId, kind: MemoryKind, address: DevicePtr) -> DriverResult<()> {
        self.enter(Call::frees(kind))?;
        let state = self.state.lock();
        if address.is_null() {
            return state.device(device).map(drop);
        }
        let bytes = state.freeable(device, kind, address)?.bytes;
        // The driver waits for the context's work. What another device's context has queued it does not know of.
        let mut state = self.wait_context(state, device.0 as usize)?;
        state.refuse_in_use(Call::frees(kind).name(), address.address(), bytes);
        let ns = state.mem_free(device, kind, address)?;
        self.spend(ns);
        Ok(())
    }

    fn mem_alloc_async(&self, device: DeviceId, bytes: u64, stream: StreamHandle) -> DriverResult<DevicePtr> {
        self.enter(Call::MemAllocAsync)?;
        let address = self.allocate_ordered(device, bytes, stream)?;
        self.spend(cost::MEM_ALLOC_ASYNC);
        Ok(address)
    }

    fn mem_free_async(&self, device: DeviceId, address: DevicePtr, stream: StreamHandle) -> DriverResult<()> {
        self.enter(Call::MemFreeAsync)?;
        self.free_ordered(device, address, stream)?;
        self.spend(cost::MEM_FREE_ASYNC);
        Ok(())
    }

    fn mem_pool_threshold(&self, device: DeviceId, _bytes: u64) -> DriverResult<()> {
        self.fixed(Call::MemPoolThreshold, 0, || self.state.lock().device_with_pools(device).map(drop))
    }

    fn mem_granularity(&self, properties: &HandleProperties) -> DriverResult<Granularity> {
        self.fixed(Call::MemGranularity, 0, || self.state.lock().mem_granularity(properties))
    }

    fn mem_address_reserve(&self, bytes: u64, alignment: u64) -> DriverResult<DevicePtr> {
        self.priced(Call::MemAddressReserve, |state| state.mem_address_reserve(bytes, alignment))
    }

    fn mem_address_free(&self, address: DevicePtr, bytes: u64) -> DriverResult<()> {
        self.priced(Call::MemAddressFree, |state| Ok(((), state.mem_address_free(address, bytes)?)))
    }

    fn mem_create(&self, bytes: u64, properties: &HandleProperties) -> DriverResult<PhysicalHandle> {
        self.priced(Call::MemCreate, |state| state.mem_create(bytes, properties))
    }

    fn mem_release(&self, handle: PhysicalHandle) -> DriverResult<()> {
        self.priced(Call::MemRelease, |state| Ok(((), state.mem_release(handle)?)))
    }

    fn mem_map(&self, address: DevicePtr, bytes: u64, offset: u64, handle: PhysicalHandle) -> DriverResult<()> {
        self.priced(Call::MemMap, |state| Ok(((), state.mem_map(address, bytes, offset, handle)?)))
    }

    fn mem_unmap(&self, address: DevicePtr, bytes: u64) -> DriverResult<()> {
        self.priced(Call::MemUnmap, |state| Ok(((), state.mem_unmap(address, bytes)?)))
    }

    fn mem_set_access(&self, address: DevicePtr, bytes: u64, access: &[AccessDescriptor]) -> DriverResult<()> {
        self.priced(Call::MemSetAccess, |state| Ok(((), state.mem_set_access(address, bytes, access)?)))
    }

    fn stream_create(&self, device: DeviceId, flags: StreamFlags) -> DriverResult<StreamHandle> {
        self.fixed(Call::StreamCreate, cost::OTHER_SYNC, || self.state.lock().stream_create(device, flags))
    }

    fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()> {
        self.fixed(Call::StreamDestroy, cost::OTHER_SYNC, || self.state.lock().stream_destroy(stream))
    }

    fn stream_id(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<u64> {
        self.fixed(Call::StreamId, cost::STREAM_ID, || {
            let mut state = self.state.lock();
            if !state.config.devices.get(device.0 as usize).is_some_and(|device| device.properties.stream_ids) {
                return Err(CuResult::ERROR_NOT_SUPPORTED);
            }
            state.stream(device, stream)
        })
    }

    fn stream_query(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<bool> {
        self.fixed(Call::StreamQuery, cost::OTHER_SYNC, || self.state.lock().stream_query(device, stream))
    }

    fn stream_synchronize(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<()> {
        self.fixed(Call::StreamSynchronize, cost::OTHER_SYNC, || self.synchronize_stream(device, stream))
    }

    fn stream_wait_event(&self, device: DeviceId, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        self.fixed(Call::StreamWaitEvent, cost::STREAM_WAIT_EVENT, || self.wait_event(device, stream, event))
    }

    fn stream_capture_status(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        self.fixed(Call::StreamCaptureStatus, cost::STREAM_CAPTURE_STATUS, || {
            self.state.lock().stream(device, stream).map(|_| CaptureStatus::None)
        })
    }

    fn thread_exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        self.fixed(Call::ThreadExchangeCaptureMode, 0, || {
            let modes = &mut self.state.lock().capture_modes;
            let thread = current_thread().id();
            let before = if mode == CaptureMode::Global { modes.remove(&thread) } else { modes.insert(thread, mode) };
            Ok(before.unwrap_or(CaptureMode::Global))
        })
    }

    fn event_create(&self, device: DeviceId) -> DriverResult<EventHandle> {
        self.fixed(Call::EventCreate, cost::EVENT_CREATE, || self.state.lock().event_create(device))
    }

    fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        self.fixed(Call::EventDestroy, cost::OTHER_SYNC, || self.state.lock().event_destroy(event))
    }

    fn event_record(&self, device: DeviceId, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        self.fixed(Call::EventRecord, cost::EVENT_RECORD, || self.record_event(device, event, stream))
    }

    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        self.fixed(Call::EventQuery, cost::EVENT_QUERY, || self.state.lock().event_query(event))
    }

    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        self.fixed(Call::EventSynchronize, cost::EVENT_QUERY, || self.synchronize_event(event))
    }

    fn context_synchronize(&self, device: DeviceId) -> DriverResult<()> {
        self.fixed(Call::ContextSynchronize, cost::OTHER_SYNC, || self.synchronized(device).map(drop))
    }

    fn memcpy_async(
        &self,
        device: DeviceId,
        destination: DevicePtr,
        source: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.fixed(Call::MemcpyAsync, 0, || self.work(device, stream, Work::Copy { destination, source, bytes }))
    }

    fn memcpy_host_to_device(&self, device: DeviceId, destination: DevicePtr, source: &[u8]) -> DriverResult<()> {
        self.fixed(Call::MemcpyHostToDevice, 0, || self.copy_in(device, destination, source))
    }

    fn memcpy_device_to_host(&self, device: DeviceId, destination: &mut [u8], source: DevicePtr) -> DriverResult<()> {
        self.fixed(Call::MemcpyDeviceToHost, 0, || self.copy_out(device, destination, source))
    }

    fn memset_d8_async(&self, device: DeviceId, address: DevicePtr, value: u8, bytes: u64, stream: StreamHandle) -> DriverResult<()> {
        self.fixed(Call::MemsetD8Async, 0, || self.work(device, stream, Work::Fill { address, value, bytes }))
    }

    fn launch_host_function(&self, device: DeviceId, stream: StreamHandle, function: Box<dyn FnOnce() + Send>) -> DriverResult<()> {
        self.fixed(Call::LaunchHostFunction, 0, || self.work(device, stream, Work::Host(function)))
    }

    fn module_load(&self, device: DeviceId, image: &[u8]) -> DriverResult<ModuleHandle> {
        self.fixed(Call::ModuleLoad, 0, || self.synchronized(device)?.module_load(device, image))
    }

    fn module_unload(&self, device: DeviceId, module: ModuleHandle) -> DriverResult<()> {
        self.fixed(Call::ModuleUnload, 0, || self.synchronized(device)?.module_unload(device, module))
    }

    fn module_function(&self, module: ModuleHandle, name: &str) -> DriverResult<FunctionHandle> {
        self.fixed(Call::ModuleFunction, 0, || self.state.lock().module_function(module, name))
    }

    fn launch_kernel(
        &self,
        device: DeviceId,
        function: FunctionHandle,
        config: LaunchConfig,
        stream: StreamHandle,
        arguments: &[KernelArgument],
    ) -> DriverResult<()> {
        self.fixed(Call::LaunchKernel, 0, || self.launch(device, function, config, stream, arguments))
    }

    fn modelled_ns(&self) -> Option<u64> {
        // Relaxed: as in `spend`.
        Some(self.modelled_ns.load(Ordering::Relaxed))
    }
}

impl fmt::Debug for SimDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("SimDriver")
            .field("devices", &state.devices.len())
            .field("backed", &state.config.backed)
            .field("handles", &state.vmm.physical_count)
            .field("mappings", &state.vmm.mappings.len())
            .field("allocations", &state.plain.allocations.len())
            .finish_non_exhaustive()
    }
}

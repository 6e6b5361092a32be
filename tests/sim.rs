//! The simulated device: its limits, its controls, and what it makes of undefined behaviour.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use vrampool::driver::sim::{BUILTIN_MODULE, FaultTarget, PlainPlacement, SimConfig, SimDriver};
use vrampool::driver::{
    AccessDescriptor, AccessFlags, Call, CaptureMode, Driver, DriverResult, EventHandle, HandleProperties, KernelArgument, LaunchConfig,
    MemoryKind, PhysicalHandle, StreamFlags, StreamHandle,
};
use vrampool::error::CuResult;
use vrampool::units::{DeviceId, DevicePtr, GIB, KIB, MIB};

const D0: DeviceId = DeviceId(0);
const D1: DeviceId = DeviceId(1);
const PAGE: u64 = 2 * MIB;
const INVALID: CuResult = CuResult::ERROR_INVALID_VALUE;
const NO_MEMORY: CuResult = CuResult::ERROR_OUT_OF_MEMORY;
const LEGACY: StreamHandle = StreamHandle::LEGACY;
const FULL: [AccessDescriptor; 1] = [AccessDescriptor { device: D0, flags: AccessFlags::ReadWrite }];

fn small() -> SimConfig {
    SimConfig::default().capacity(64 * MIB)
}

fn create(driver: &SimDriver, pages: u64) -> DriverResult<PhysicalHandle> {
    driver.mem_create(pages * PAGE, &HandleProperties::on(D0))
}

fn alloc(driver: &SimDriver, bytes: u64) -> DriverResult<DevicePtr> {
    driver.mem_alloc(D0, MemoryKind::Device, bytes)
}

fn free(driver: &SimDriver, address: DevicePtr) -> DriverResult<()> {
    driver.mem_free(D0, MemoryKind::Device, address)
}

/// A mapped and accessible page: its reservation's address and its handle.
fn mapped_page(driver: &SimDriver) -> (DevicePtr, PhysicalHandle) {
    let at = driver.mem_address_reserve(PAGE, 0).unwrap();
    let handle = create(driver, 1).unwrap();
    driver.mem_map(at, PAGE, 0, handle).unwrap();
    driver.mem_set_access(at, PAGE, &FULL).unwrap();
    (at, handle)
}

fn panic_text(work: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(work)).expect_err("this must panic");
    let text = panic.downcast_ref::<&str>().map(|&text| text.to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).expect("a panic with a message")
}

// ---- limits ----

#[test]
fn capacity_is_shared_by_handles_and_plain_allocations_and_the_peak_is_kept() {
    let driver = SimDriver::new(small().other_process(16 * MIB));
    let info = driver.memory_info(D0).unwrap();
    assert_eq!((info.free_bytes, info.total_bytes), (48 * MIB, 64 * MIB));
    let handle = create(&driver, 20).unwrap();
    let plain = alloc(&driver, 8 * MIB).unwrap();
    assert_eq!(driver.memory_info(D0).unwrap().free_bytes, 0);
    assert_eq!(create(&driver, 1), Err(NO_MEMORY));
    assert_eq!(alloc(&driver, 1), Err(NO_MEMORY));
    driver.mem_release(handle).unwrap();
    assert_eq!((driver.held_bytes(D0), driver.peak_bytes(D0)), (8 * MIB, 48 * MIB));
    free(&driver, plain).unwrap();
    assert_eq!(driver.held_bytes(D0), 0);
    assert_eq!(driver.audit(), Ok(()));
}

#[test]
fn pinned_and_managed_memory_is_the_hosts() {
    let mut config = small();
    config.host_bytes = 8 * MIB;
    let driver = SimDriver::new(config);
    let pinned = driver.mem_alloc(D0, MemoryKind::Pinned, 6 * MIB).unwrap();
    assert_eq!((driver.held_bytes(D0), driver.host_bytes()), (0, 6 * MIB));
    assert_eq!(driver.mem_alloc(D0, MemoryKind::Managed, 3 * MIB), Err(NO_MEMORY));
    let managed = driver.mem_alloc(D0, MemoryKind::Managed, 2 * MIB).unwrap();
    driver.mem_free(D0, MemoryKind::Pinned, pinned).unwrap();
    assert_eq!(driver.mem_free(D0, MemoryKind::Device, managed), Err(INVALID));
    driver.mem_free(D0, MemoryKind::Managed, managed).unwrap();
    assert_eq!(driver.audit(), Ok(()));
}

#[test]
fn handles_run_out_before_memory_does() {
    let driver = SimDriver::new(small().handle_limit(3));
    let at = driver.mem_address_reserve(PAGE, 0).unwrap();
    let handles: Vec<_> = (0..3).map(|_| create(&driver, 1).unwrap()).collect();
    assert_eq!(create(&driver, 1), Err(NO_MEMORY));
    // Released but mapped, it still is one of the three.
    driver.mem_map(at, PAGE, 0, handles[0]).unwrap();
    driver.mem_release(handles[0]).unwrap();
    assert_eq!(driver.live_handles(), 2);
    assert_eq!(create(&driver, 1), Err(NO_MEMORY));
    driver.mem_unmap(at, PAGE).unwrap();
    assert!(create(&driver, 1).is_ok());
}

#[test]
fn addresses_run_out_for_reservations_and_plain_allocations_together() {
    let driver = SimDriver::new(small().address_space(32 * MIB));
    let at = driver.mem_address_reserve(24 * MIB, 0).unwrap();
    assert_eq!(driver.mem_address_reserve(10 * MIB, 0), Err(NO_MEMORY));
    let plain = alloc(&driver, 8 * MIB).unwrap();
    assert_eq!(alloc(&driver, 1), Err(NO_MEMORY));
    assert_eq!(driver.held_bytes(D0), 8 * MIB, "a refused allocation takes no memory");
    driver.mem_address_free(at, 24 * MIB).unwrap();
    assert_eq!(driver.reserved_address_bytes(), 0);
    assert!(alloc(&driver, 8 * MIB).is_ok());
    free(&driver, plain).unwrap();
}

// ---- addresses and values ----

#[test]
fn plain_allocations_touch_when_they_should_and_are_odd_when_they_should() {
    let driver = SimDriver::new(small().placement(PlainPlacement::Adjacent));
    let first = alloc(&driver, MIB + 256).unwrap();
    assert_eq!(alloc(&driver, 3 * MIB).unwrap(), first.offset(MIB + 256));

    let driver = SimDriver::new(small().placement(PlainPlacement::Odd));
    let mut last = 0;
    for bytes in [1, 256, 257, 512, MIB] {
        let at = alloc(&driver, bytes).unwrap().address();
        assert_eq!(at % 512, 256);
        assert!(at > last, "never touching");
        last = at + bytes;
    }

    let driver = SimDriver::new(small());
    assert!(alloc(&driver, 1).unwrap().is_aligned_to(512));
    assert!(alloc(&driver, MIB).unwrap().is_aligned_to(PAGE));
}

#[test]
fn freed_addresses_come_back_at_once_or_never() {
    for reuse in [true, false] {
        let driver = SimDriver::new(small().reuse(reuse));
        let at = alloc(&driver, MIB).unwrap();
        let _after = alloc(&driver, MIB).unwrap();
        free(&driver, at).unwrap();
        assert_eq!(alloc(&driver, MIB).unwrap() == at, reuse);
        let range = driver.mem_address_reserve(PAGE, 0).unwrap();
        driver.mem_address_free(range, PAGE).unwrap();
        assert_eq!(driver.mem_address_reserve(PAGE, 0).unwrap() == range, reuse);
    }
}

#[test]
fn devices_never_share_an_address() {
    let driver = SimDriver::new(small().device_count(2));
    let mut ranges: Vec<_> = (0..16).map(|i| driver.mem_alloc(DeviceId(i % 2), MemoryKind::Device, MIB).unwrap().address()).collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0] + MIB <= pair[1]));
    assert_eq!((driver.held_bytes(D0), driver.held_bytes(D1)), (8 * MIB, 8 * MIB));
}

#[test]
fn values_of_dead_streams_and_events_come_back_but_ids_do_not() {
    let driver = SimDriver::h200();
    let first = driver.stream_create(D0, StreamFlags::NonBlocking).unwrap();
    let id = driver.stream_id(D0, first).unwrap();
    driver.stream_destroy(first).unwrap();
    let second = driver.stream_create(D0, StreamFlags::NonBlocking).unwrap();
    assert_eq!(first, second);
    assert_ne!(driver.stream_id(D0, second).unwrap(), id);
    let event = driver.event_create(D0).unwrap();
    driver.event_destroy(event).unwrap();
    assert_eq!(driver.event_create(D0).unwrap(), event);
}

#[test]
fn the_per_thread_stream_and_the_capture_mode_are_each_threads_own() {
    let driver = SimDriver::h200();
    let id = driver.stream_id(D0, StreamHandle::PER_THREAD).unwrap();
    assert_eq!(driver.stream_id(D0, StreamHandle::PER_THREAD).unwrap(), id);
    driver.thread_exchange_capture_mode(CaptureMode::Relaxed).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_ne!(driver.stream_id(D0, StreamHandle::PER_THREAD).unwrap(), id);
            assert_eq!(driver.thread_exchange_capture_mode(CaptureMode::ThreadLocal), Ok(CaptureMode::Global));
        });
    });
    assert_eq!(driver.thread_exchange_capture_mode(CaptureMode::Global), Ok(CaptureMode::Relaxed));
}

// ---- mappings ----

#[test]
fn one_unmap_is_one_mapping_unless_more_are_allowed() {
    for allowed in [false, true] {
        let driver = SimDriver::new(small().multi_unmap(allowed));
        let at = driver.mem_address_reserve(8 * PAGE, 0).unwrap();
        for page in [0, 1, 3] {
            let handle = create(&driver, 1).unwrap();
            driver.mem_map(at.offset(page * PAGE), PAGE, 0, handle).unwrap();
            driver.mem_release(handle).unwrap();
        }
        let expected = if allowed { Ok(()) } else { Err(INVALID) };
        assert_eq!(driver.mem_unmap(at.offset(6 * PAGE), PAGE), expected, "nothing");
        assert_eq!(driver.mem_unmap(at, 2 * PAGE), expected, "two");
        assert_eq!(driver.mem_unmap(at.offset(2 * PAGE), 3 * PAGE), expected, "one and holes");
        assert_eq!(driver.mem_unmap(at, 9 * PAGE), Err(INVALID), "past the end");
        assert_eq!(driver.live_mappings(), if allowed { 0 } else { 3 });
        assert_eq!(driver.held_bytes(D0), if allowed { 0 } else { 3 * PAGE });
    }
}

#[test]
fn a_mapping_stays_inside_its_reservation() {
    let driver = SimDriver::new(small());
    let first = driver.mem_address_reserve(PAGE, 0).unwrap();
    let second = driver.mem_address_reserve(PAGE, 0).unwrap();
    assert_eq!(second, first.offset(PAGE), "two reservations that touch");
    let handle = create(&driver, 2).unwrap();
    assert_eq!(driver.mem_map(first, 2 * PAGE, 0, handle), Err(INVALID));
}

#[test]
fn peers_reach_mappings_only_where_the_machine_lets_them() {
    let driver = SimDriver::new(small().device_count(2).peer(1, 0, false));
    assert_eq!(driver.can_access_peer(D0, D1), Ok(true));
    assert_eq!(driver.can_access_peer(D1, D0), Ok(false));
    let (at, _) = mapped_page(&driver);
    let peer = [AccessDescriptor { device: D1, flags: AccessFlags::Read }];
    assert_eq!(driver.mem_set_access(at, PAGE, &peer), Err(CuResult::ERROR_INVALID_DEVICE));

    let driver = SimDriver::new(small().device_count(2));
    let (at, _) = mapped_page(&driver);
    assert!(!driver.is_writable(D1, at, PAGE));
    driver.mem_set_access(at, PAGE, &peer).unwrap();
    assert!(!driver.is_writable(D1, at, PAGE), "reading is not writing");
    driver.mem_set_access(at, PAGE, &[AccessDescriptor { device: D1, flags: AccessFlags::ReadWrite }]).unwrap();
    assert!(driver.is_writable(D1, at, PAGE) && driver.is_writable(D0, at, PAGE));
}

#[test]
fn what_belongs_to_another_device_is_refused() {
    let driver = SimDriver::new(small().device_count(2));
    let plain = alloc(&driver, MIB).unwrap();
    assert_eq!(driver.mem_free(D1, MemoryKind::Device, plain), Err(INVALID));
    let stream = driver.stream_create(D0, StreamFlags::NonBlocking).unwrap();
    assert_eq!(driver.stream_query(D1, stream), Err(CuResult::ERROR_INVALID_HANDLE));
    assert_eq!(driver.memset_d8_async(D1, plain, 0, 1, stream), Err(CuResult::ERROR_INVALID_HANDLE));
}

// ---- backed memory ----

#[test]
fn a_released_handles_bytes_are_gone_and_its_memory_is_the_next_ones() {
    let driver = SimDriver::new(small().backed(true));
    for round in 0..3 {
        let (at, handle) = mapped_page(&driver);
        let mut read = [1; 4];
        driver.memcpy_device_to_host(D0, &mut read, at.offset(PAGE - 4)).unwrap();
        assert_eq!(read, [0; 4], "fresh memory in round {round}");
        driver.memset_d8_async(D0, at, 0xee, PAGE, LEGACY).unwrap();
        driver.mem_unmap(at, PAGE).unwrap();
        driver.mem_release(handle).unwrap();
        driver.mem_address_free(at, PAGE).unwrap();
    }
    assert_eq!(driver.audit(), Ok(()));
}

#[test]
fn plain_allocations_keep_their_bytes_to_themselves() {
    for placement in [PlainPlacement::Driver, PlainPlacement::Adjacent, PlainPlacement::Odd] {
        let driver = SimDriver::new(small().backed(true).placement(placement));
        let sizes = [1, 255, 4096, 70_000, MIB, 300];
        let blocks: Vec<_> = sizes.iter().map(|&bytes| alloc(&driver, bytes).unwrap()).collect();
        for (i, (&at, &bytes)) in blocks.iter().zip(&sizes).enumerate() {
            driver.memset_d8_async(D0, at, i as u8 + 1, bytes, LEGACY).unwrap();
        }
        free(&driver, blocks[3]).unwrap();
        for (i, (&at, &bytes)) in blocks.iter().zip(&sizes).enumerate().filter(|&(i, _)| i != 3) {
            let mut read = vec![0; bytes as usize];
            driver.memcpy_device_to_host(D0, &mut read, at).unwrap();
            assert!(read.iter().all(|&byte| byte == i as u8 + 1), "{placement:?}, block {i}");
        }
    }
}

#[test]
fn a_backed_machine_reserves_eight_times_its_memory_and_no_more() {
    let driver = SimDriver::new(small().backed(true));
    assert_eq!(driver.mem_address_reserve(8 * 64 * MIB + PAGE, 0), Err(NO_MEMORY));
    let at = driver.mem_address_reserve(8 * 64 * MIB, 0).unwrap();
    assert_eq!(driver.mem_address_reserve(PAGE, 0), Err(NO_MEMORY));
    driver.mem_address_free(at, 8 * 64 * MIB).unwrap();
    assert!(driver.mem_address_reserve(PAGE, GIB).unwrap().is_aligned_to(GIB));
}

#[test]
fn a_backed_machine_maps_sixteen_thousand_handles_and_no_more() {
    let unit = 64 * KIB;
    let driver = SimDriver::new(SimConfig::default().capacity(GIB).granularity(unit).backed(true));
    let at = driver.mem_address_reserve(16_001 * unit, 0).unwrap();
    let mut handles = Vec::new();
    for i in 0..16_001 {
        handles.push(driver.mem_create(unit, &HandleProperties::on(D0)).unwrap());
        let expected = if i < 16_000 { Ok(()) } else { Err(NO_MEMORY) };
        assert_eq!(driver.mem_map(at.offset(i * unit), unit, 0, handles[i as usize]), expected, "handle {i}");
    }
    driver.mem_set_access(at, 16_000 * unit, &FULL).unwrap();
    driver.mem_unmap(at, unit).unwrap();
    driver.mem_map(at.offset(16_000 * unit), unit, 0, handles[16_000]).unwrap();
}

#[test]
fn a_machine_of_addresses_alone_checks_copies_and_moves_nothing() {
    let driver = SimDriver::h200();
    let at = alloc(&driver, 64 * GIB).unwrap();
    driver.memcpy_host_to_device(D0, at, &[1, 2, 3]).unwrap();
    assert_eq!(driver.memcpy_device_to_host(D0, &mut [0; 3], at), Err(CuResult::ERROR_NOT_SUPPORTED));
    assert_eq!(driver.memcpy_host_to_device(D0, at.offset(64 * GIB - 2), &[1, 2, 3]), Err(INVALID));
}

// ---- streams ----

/// A host function that writes its name into a list.
fn note(driver: &SimDriver, stream: StreamHandle, list: &Arc<Mutex<Vec<&'static str>>>, name: &'static str) {
    let list = Arc::clone(list);
    driver.launch_host_function(D0, stream, Box::new(move || list.lock().unwrap().push(name))).unwrap();
}

fn recorded(driver: &SimDriver, stream: StreamHandle) -> EventHandle {
    let event = driver.event_create(D0).unwrap();
    driver.event_record(D0, event, stream).unwrap();
    event
}

#[test]
fn a_stalled_stream_holds_its_work_its_events_and_who_waits_for_them() {
    let driver = SimDriver::h200();
    let [a, b, c] = [(); 3].map(|()| driver.stream_create(D0, StreamFlags::NonBlocking).unwrap());
    let list = Arc::default();
    note(&driver, a, &list, "a before");
    driver.stall(D0, a).unwrap();
    note(&driver, a, &list, "a");
    let on_a = recorded(&driver, a);
    note(&driver, a, &list, "a after");
    driver.stream_wait_event(D0, b, on_a).unwrap();
    note(&driver, b, &list, "b");
    let on_b = recorded(&driver, b);
    driver.stream_wait_event(D0, c, on_b).unwrap();
    note(&driver, c, &list, "c");
    assert_eq!(*list.lock().unwrap(), ["a before"]);
    for stream in [a, b, c] {
        assert_eq!(driver.stream_query(D0, stream), Ok(false));
    }
    assert_eq!((driver.event_query(on_a), driver.event_query(on_b)), (Ok(false), Ok(false)));
    // A later record on an idle stream is the event's new and only meaning.
    let idle = driver.stream_create(D0, StreamFlags::NonBlocking).unwrap();
    driver.event_record(D0, on_a, idle).unwrap();
    assert_eq!(driver.event_query(on_a), Ok(true));
    driver.resume(D0, a).unwrap();
    let order = list.lock().unwrap().clone();
    assert_eq!(order.len(), 5);
    let place = |name| order.iter().position(|&other| other == name).unwrap();
    assert!(place("a") < place("a after") && place("a") < place("b") && place("b") < place("c"), "{order:?}");
    assert_eq!(driver.event_query(on_b), Ok(true));
    driver.context_synchronize(D0).unwrap();
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_and_they_for_it() {
    let driver = SimDriver::h200();
    let blocking = driver.stream_create(D0, StreamFlags::Blocking).unwrap();
    let other = driver.stream_create(D0, StreamFlags::Blocking).unwrap();
    let free = driver.stream_create(D0, StreamFlags::NonBlocking).unwrap();
    driver.stall(D0, blocking).unwrap();
    let first = recorded(&driver, blocking);
    // As seen on an H200: alone, blocking streams run side by side; a wait for a finished event in the legacy stream
    // changes nothing; a record there is a barrier.
    assert_eq!(driver.event_query(recorded(&driver, other)), Ok(true));
    assert_eq!(driver.stream_query(D0, LEGACY), Ok(false));
    let done = recorded(&driver, free);
    driver.stream_wait_event(D0, LEGACY, done).unwrap();
    assert_eq!(driver.event_query(recorded(&driver, other)), Ok(true));
    let barrier = recorded(&driver, LEGACY);
    let behind = recorded(&driver, other);
    let thread = recorded(&driver, StreamHandle::PER_THREAD);
    assert_eq!(driver.event_query(recorded(&driver, free)), Ok(true));
    for event in [first, barrier, behind, thread] {
        assert_eq!(driver.event_query(event), Ok(false));
    }
    driver.resume(D0, blocking).unwrap();
    for event in [first, barrier, behind, thread] {
        assert_eq!(driver.event_query(event), Ok(true));
    }
}

/// Checks that a call blocks until another thread resumes the stream.
fn blocks_until_resumed(call: impl FnOnce(&SimDriver, StreamHandle, EventHandle, DevicePtr) + Send) {
    let driver = SimDriver::h200();
    let stream = driver.stream_create(D0, StreamFlags::NonBlocking).unwrap();
    let plain = alloc(&driver, MIB).unwrap();
    driver.stall(D0, stream).unwrap();
    driver.memset_d8_async(D0, plain, 0, 16, stream).unwrap();
    let event = recorded(&driver, stream);
    let resumed = AtomicBool::new(false);
    let entered = driver.calls(FaultTarget::AnyCall);
    thread::scope(|scope| {
        scope.spawn(|| {
            call(&driver, stream, event, plain);
            assert!(resumed.load(Ordering::SeqCst), "the call came back before the work was done");
        });
        while driver.calls(FaultTarget::AnyCall) == entered {
            thread::yield_now();
        }
        resumed.store(true, Ordering::SeqCst);
        driver.resume(D0, stream).unwrap();
    });
}

#[test]
fn host_calls_wait_for_stalled_work() {
    blocks_until_resumed(|driver, stream, _, _| driver.stream_synchronize(D0, stream).unwrap());
    blocks_until_resumed(|driver, _, event, _| driver.event_synchronize(event).unwrap());
    blocks_until_resumed(|driver, _, _, _| driver.context_synchronize(D0).unwrap());
    blocks_until_resumed(|driver, _, _, plain| free(driver, plain).unwrap());
    blocks_until_resumed(|driver, _, _, _| _ = driver.module_load(D0, BUILTIN_MODULE.as_bytes()).unwrap());
}

#[test]
fn calls_that_do_not_wait_go_on_beside_stalled_work() {
    let driver = SimDriver::h200();
    let stream = driver.stream_create(D0, StreamFlags::Blocking).unwrap();
    driver.stall(D0, stream).unwrap();
    let event = recorded(&driver, stream);
    let (at, handle) = mapped_page(&driver);
    driver.mem_unmap(at, PAGE).unwrap();
    driver.mem_release(handle).unwrap();
    alloc(&driver, MIB).unwrap();
    driver.memory_info(D0).unwrap();
    // Its work outlives a destroyed stream.
    driver.stream_destroy(stream).unwrap();
    assert_eq!(driver.event_query(event), Ok(false));
    driver.resume_all();
    assert_eq!(driver.event_query(event), Ok(true));
}

#[test]
fn a_host_function_may_not_call_the_driver() {
    let driver = SimDriver::h200();
    let answer = Arc::new(Mutex::new(None));
    let (inner, slot) = (Arc::clone(&driver), Arc::clone(&answer));
    driver.launch_host_function(D0, LEGACY, Box::new(move || *slot.lock().unwrap() = Some(inner.memory_info(D0)))).unwrap();
    assert_eq!(*answer.lock().unwrap(), Some(Err(CuResult::ERROR_NOT_PERMITTED)));
    assert!(driver.memory_info(D0).is_ok());
}

#[test]
fn a_host_function_that_panics_leaves_the_stream_usable() {
    let driver = SimDriver::h200();
    let launch = || driver.launch_host_function(D0, LEGACY, Box::new(|| panic!("from the host function")));
    assert_eq!(panic_text(|| launch().unwrap()), "from the host function");
    assert_eq!(driver.stream_query(D0, LEGACY), Ok(true));
}

// ---- errors that stay ----

const SHAPE: LaunchConfig = LaunchConfig { grid: [1, 1, 1], block: [1, 1, 1], shared_bytes: 0 };

#[test]
fn a_kernel_that_strays_breaks_its_context_when_it_runs() {
    let driver = SimDriver::new(small().device_count(2));
    let module = driver.module_load(D0, BUILTIN_MODULE.as_bytes()).unwrap();
    let fill = driver.module_function(module, "fill").unwrap();
    let stream = driver.stream_create(D0, StreamFlags::NonBlocking).unwrap();
    let plain = alloc(&driver, 1024).unwrap();
    let launch = |words| {
        let arguments = [KernelArgument::Pointer(plain), KernelArgument::U64(words), KernelArgument::U32(0)];
        driver.launch_kernel(D0, fill, SHAPE, stream, &arguments)
    };
    launch(256).unwrap();
    driver.stall(D0, stream).unwrap();
    launch(257).unwrap();
    let event = recorded(&driver, stream);
    assert_eq!(driver.event_query(event), Ok(false));
    driver.resume(D0, stream).unwrap();
    const CODE: CuResult = CuResult::ERROR_ILLEGAL_ADDRESS;
    assert_eq!(driver.event_query(event), Err(CODE));
    assert_eq!(driver.context_synchronize(D0), Err(CODE));
    assert_eq!(free(&driver, plain), Err(CODE));
    assert!(driver.memory_info(D1).is_ok(), "the other device's context is sound");
}

#[test]
fn a_kernel_reaches_no_plain_memory_of_another_device_but_a_copy_does() {
    let driver = SimDriver::new(small().device_count(2));
    let here = alloc(&driver, MIB).unwrap();
    let there = driver.mem_alloc(D1, MemoryKind::Device, MIB).unwrap();
    driver.memcpy_async(D0, here, there, MIB, LEGACY).unwrap();
    let module = driver.module_load(D0, BUILTIN_MODULE.as_bytes()).unwrap();
    let copy = driver.module_function(module, "copy").unwrap();
    let arguments = [KernelArgument::Pointer(here), KernelArgument::Pointer(there), KernelArgument::U64(16)];
    driver.launch_kernel(D0, copy, SHAPE, LEGACY, &arguments).unwrap();
    assert_eq!(driver.context_synchronize(D0), Err(CuResult::ERROR_ILLEGAL_ADDRESS));
}

#[test]
fn kernels_take_their_own_arguments_only() {
    let driver = SimDriver::h200();
    let module = driver.module_load(D0, BUILTIN_MODULE.as_bytes()).unwrap();
    let spin = driver.module_function(module, "spin").unwrap();
    for arguments in [&[][..], &[KernelArgument::U32(1)], &[KernelArgument::U64(1), KernelArgument::U64(1)]] {
        assert_eq!(driver.launch_kernel(D0, spin, SHAPE, LEGACY, arguments), Err(INVALID));
    }
    driver.module_unload(D0, module).unwrap();
    assert_eq!(driver.module_unload(D0, module), Err(CuResult::ERROR_INVALID_HANDLE));
    let launch = driver.launch_kernel(D0, spin, SHAPE, LEGACY, &[KernelArgument::U64(1)]);
    assert_eq!(launch, Err(CuResult::ERROR_INVALID_HANDLE));
}

#[test]
fn a_poisoned_context_frees_who_waits_for_it() {
    let driver = SimDriver::h200();
    let stream = driver.stream_create(D0, StreamFlags::NonBlocking).unwrap();
    driver.stall(D0, stream).unwrap();
    let event = recorded(&driver, stream);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| driver.event_synchronize(event));
        driver.poison(D0, CuResult::ERROR_ECC_UNCORRECTABLE);
        assert_eq!(waiter.join().unwrap(), Err(CuResult::ERROR_ECC_UNCORRECTABLE));
    });
    assert_eq!(alloc(&driver, MIB), Err(CuResult::ERROR_ECC_UNCORRECTABLE));
}

// ---- undefined behaviour ----

#[test]
fn memory_taken_from_under_queued_work_ends_the_test() {
    let driver = SimDriver::h200();
    let stream = driver.stream_create(D0, StreamFlags::NonBlocking).unwrap();
    let (at, _) = mapped_page(&driver);
    let (elsewhere, _) = mapped_page(&driver);
    driver.stall(D0, stream).unwrap();
    driver.memset_d8_async(D0, at.offset(PAGE - 1), 0, 1, stream).unwrap();
    let text = panic_text(|| driver.mem_unmap(at, PAGE).unwrap());
    assert!(text.contains("cuMemUnmap") && text.contains("cuMemsetD8Async"), "{text}");
    driver.mem_unmap(elsewhere, PAGE).unwrap();
    driver.resume(D0, stream).unwrap();
    driver.mem_unmap(at, PAGE).unwrap();
}

#[test]
fn memory_freed_under_another_devices_work_ends_the_test() {
    let driver = SimDriver::new(small().device_count(2));
    let stream = driver.stream_create(D1, StreamFlags::NonBlocking).unwrap();
    let plain = alloc(&driver, MIB).unwrap();
    let other = driver.mem_alloc(D1, MemoryKind::Device, MIB).unwrap();
    driver.stall(D1, stream).unwrap();
    driver.memcpy_async(D1, other, plain, MIB, stream).unwrap();
    let text = panic_text(|| free(&driver, plain).unwrap());
    assert!(text.contains("cuMemFree") && text.contains("cuMemcpyAsync"), "{text}");
}

#[test]
fn dead_handles_end_the_test() {
    let driver = SimDriver::new(small().reuse(false));
    let stream = driver.stream_create(D0, StreamFlags::NonBlocking).unwrap();
    let event = driver.event_create(D0).unwrap();
    let handle = create(&driver, 1).unwrap();
    let at = driver.mem_address_reserve(PAGE, 0).unwrap();
    driver.stream_destroy(stream).unwrap();
    driver.event_destroy(event).unwrap();
    driver.mem_release(handle).unwrap();
    let calls: [(&str, &dyn Fn()); 9] = [
        ("stream query", &|| _ = driver.stream_query(D0, stream)),
        ("stream id", &|| _ = driver.stream_id(D0, stream)),
        ("stream destroy", &|| _ = driver.stream_destroy(stream)),
        ("a stream never made", &|| _ = driver.stream_query(D0, StreamHandle(0x1234_5670))),
        ("event query", &|| _ = driver.event_query(event)),
        ("event destroy", &|| _ = driver.event_destroy(event)),
        ("map", &|| _ = driver.mem_map(at, PAGE, 0, handle)),
        ("release of a handle never made", &|| _ = driver.mem_release(PhysicalHandle(0x1234_5670))),
        ("copy from nowhere", &|| _ = driver.memcpy_async(D0, at, DevicePtr::new(0x1234_5600), 16, LEGACY)),
    ];
    for (what, call) in calls {
        assert!(panic_text(call).starts_with("undefined behaviour"), "{what}");
    }
    assert_eq!(driver.mem_release(handle), Err(INVALID));
}

// ---- faults ----

#[test]
fn the_kth_call_fails_and_has_no_effect() {
    let driver = SimDriver::new(small());
    driver.fail(Call::MemCreate, 1, CuResult::ERROR_UNKNOWN);
    driver.fail(FaultTarget::MemoryCalls, 3, NO_MEMORY);
    let first = create(&driver, 1).unwrap(); // memory call 0
    driver.memory_info(D0).unwrap();
    assert_eq!(create(&driver, 1), Err(CuResult::ERROR_UNKNOWN)); // 1
    create(&driver, 1).unwrap(); // 2
    assert_eq!(driver.faults_planned(), 1);
    assert_eq!(driver.mem_release(first), Err(NO_MEMORY)); // 3
    assert_eq!((driver.live_handles(), driver.faults_planned()), (2, 0));
    driver.mem_release(first).unwrap();
    assert_eq!(driver.calls(Call::MemCreate), 3);
    assert_eq!(driver.calls(FaultTarget::MemoryCalls), 5);
    assert_eq!(driver.calls(FaultTarget::AnyCall), 6);
    driver.fail(FaultTarget::AnyCall, 0, NO_MEMORY);
    driver.clear_faults();
    assert!(driver.memory_info(D0).is_ok());
}

#[test]
fn a_planned_panic_has_no_effect_either_and_leaves_no_lock() {
    let driver = SimDriver::new(small());
    driver.panic_at(Call::MemCreate, 0);
    assert_eq!(panic_text(|| _ = create(&driver, 1)), "planned panic in cuMemCreate");
    assert_eq!(driver.live_handles(), 0);
    assert!(create(&driver, 1).is_ok());
}

#[test]
fn a_hook_runs_before_the_call_and_may_call_the_driver() {
    let driver = SimDriver::new(small());
    let held = Arc::new(AtomicU64::new(u64::MAX));
    let (seen, inner) = (Arc::clone(&held), Arc::downgrade(&driver));
    driver.set_hook(move |call| {
        if call == Call::MemCreate {
            let driver = inner.upgrade().unwrap();
            driver.memory_info(D0).unwrap();
            seen.store(driver.held_bytes(D0), Ordering::SeqCst);
        }
    });
    create(&driver, 1).unwrap();
    assert_eq!(held.load(Ordering::SeqCst), 0);
    create(&driver, 1).unwrap();
    assert_eq!(held.load(Ordering::SeqCst), PAGE);
    driver.clear_hook();
    create(&driver, 1).unwrap();
    assert_eq!(held.load(Ordering::SeqCst), PAGE);
}

// ---- accounts ----

#[test]
fn modelled_time_is_what_the_calls_cost_on_the_machine_measured() {
    let driver = SimDriver::h200();
    assert_eq!(driver.modelled_ns(), Some(0));
    let before = |driver: &SimDriver| driver.modelled_ns().unwrap();
    let cost = |work: &mut dyn FnMut()| {
        let start = before(&driver);
        work();
        before(&driver) - start
    };
    let at = driver.mem_address_reserve(4 * GIB, 0).unwrap();
    let mut handle = PhysicalHandle(0);
    assert_eq!(cost(&mut || handle = driver.mem_create(GIB, &HandleProperties::on(D0)).unwrap()), 104_000);
    assert_eq!(cost(&mut || driver.mem_map(at, GIB, 0, handle).unwrap()), 3_000);
    assert_eq!(cost(&mut || driver.mem_set_access(at, GIB, &FULL).unwrap()), 89_000);
    let page = create(&driver, 1).unwrap();
    driver.mem_map(at.offset(GIB), PAGE, 0, page).unwrap();
    assert_eq!(cost(&mut || driver.mem_set_access(at, GIB + PAGE, &FULL).unwrap()), 89_000 + 40_000);
    assert_eq!(cost(&mut || driver.mem_unmap(at, GIB).unwrap()), 38_000);
    assert_eq!(cost(&mut || driver.mem_release(handle).unwrap()), 611_000);
    assert_eq!(cost(&mut || assert!(create(&driver, 1 << 30).is_err())), 0, "a refused call is not priced");
}

#[test]
fn the_audit_names_everything_outstanding() {
    let driver = SimDriver::new(small());
    assert_eq!(driver.audit(), Ok(()));
    mapped_page(&driver);
    alloc(&driver, MIB).unwrap();
    driver.stream_create(D0, StreamFlags::Blocking).unwrap();
    driver.event_create(D0).unwrap();
    driver.module_load(D0, BUILTIN_MODULE.as_bytes()).unwrap();
    let report = driver.audit().unwrap_err();
    for what in ["plain allocation", "handle", "mapping", "reservation", "stream", "event", "module", "3145728 bytes held"] {
        assert!(report.contains(what), "{what} in:\n{report}");
    }
    for _ in 0..20 {
        driver.event_create(D0).unwrap();
    }
    assert!(driver.audit().unwrap_err().contains("21 in all"));
}

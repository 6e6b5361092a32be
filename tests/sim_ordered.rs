//! The simulated device: allocations in the order of a stream.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use vrampool::driver::sim::{FaultTarget, SimConfig, SimDriver};
use vrampool::driver::{Call, Driver, HandleProperties, MemoryKind, Meter, StreamFlags, StreamHandle};
use vrampool::error::CuResult;
use vrampool::units::{DeviceId, DevicePtr, MIB};

const D0: DeviceId = DeviceId(0);
const D1: DeviceId = DeviceId(1);

fn small() -> SimConfig {
    SimConfig::default().capacity(64 * MIB)
}

/// A machine, and a stream of it that is stalled.
fn stalled(config: SimConfig) -> (Arc<SimDriver>, StreamHandle) {
    let driver = SimDriver::new(config);
    let stream = driver.stream_create(D0, StreamFlags::NonBlocking).unwrap();
    driver.stall(D0, stream).unwrap();
    (driver, stream)
}

#[test]
fn memory_in_a_streams_order_is_there_and_gone_where_the_stream_comes_to_it() {
    let (driver, stream) = stalled(small().backed(true));
    let at = driver.mem_alloc_async(D0, 4096, stream).unwrap();
    assert_eq!(driver.held_bytes(D0), 4096, "it is charged at once");
    driver.memset_d8_async(D0, at, 7, 4096, stream).unwrap();
    driver.mem_free_async(D0, at, stream).unwrap();
    assert_eq!(driver.mem_free_async(D0, at, stream), Err(CuResult::ERROR_INVALID_VALUE), "it is on its way");
    assert_ne!(driver.mem_alloc_async(D0, 4096, StreamHandle::LEGACY).unwrap(), at, "nobody else gets it before it is gone");
    driver.resume(D0, stream).unwrap();
    assert_eq!(driver.held_bytes(D0), 4096, "the other one");
    assert_eq!(driver.mem_free_async(D0, at, stream), Err(CuResult::ERROR_INVALID_VALUE), "it is gone");
    assert!(driver.context_synchronize(D0).is_ok(), "the fill came between the two");
    assert_eq!(driver.mem_alloc_async(D0, 4096, stream).unwrap(), at, "its address comes back");
}

#[test]
fn work_beside_a_streams_order_strays() {
    // Before the allocation, and after the free.
    for frees in [false, true] {
        let (driver, stream) = stalled(small());
        let other = driver.stream_create(D0, StreamFlags::NonBlocking).unwrap();
        let at = driver.mem_alloc_async(D0, 4096, stream).unwrap();
        if frees {
            driver.mem_free_async(D0, at, stream).unwrap();
            driver.memset_d8_async(D0, at, 7, 4096, stream).unwrap();
            let panic = catch_unwind(AssertUnwindSafe(|| driver.resume(D0, stream))).expect_err("this must panic");
            let text = panic.downcast_ref::<String>().expect("a panic with a message");
            assert!(text.contains("cuMemFreeAsync of 4096 bytes") && text.contains("cuMemsetD8Async"), "{text}");
        } else {
            driver.memset_d8_async(D0, at, 7, 4096, other).unwrap();
            assert_eq!(driver.context_synchronize(D0), Err(CuResult::ERROR_ILLEGAL_ADDRESS));
        }
    }
    // An event puts the other stream's work behind the allocation.
    let (driver, stream) = stalled(small());
    let other = driver.stream_create(D0, StreamFlags::NonBlocking).unwrap();
    let at = driver.mem_alloc_async(D0, 4096, stream).unwrap();
    let event = driver.event_create(D0).unwrap();
    driver.event_record(D0, event, stream).unwrap();
    driver.stream_wait_event(D0, other, event).unwrap();
    driver.memset_d8_async(D0, at, 7, 4096, other).unwrap();
    driver.mem_free_async(D0, at, other).unwrap();
    driver.resume(D0, stream).unwrap();
    assert_eq!((driver.context_synchronize(D0), driver.held_bytes(D0)), (Ok(()), 0));
}

#[test]
fn each_family_of_memory_is_freed_as_what_it_is() {
    let driver = SimDriver::new(small().device_count(2));
    let stream = StreamHandle::LEGACY;
    let refused = Err(CuResult::ERROR_INVALID_VALUE);
    let ordered = driver.mem_alloc_async(D0, 300, stream).unwrap();
    let plain = [MemoryKind::Device, MemoryKind::Pinned, MemoryKind::Managed].map(|kind| (kind, driver.mem_alloc(D0, kind, 300).unwrap()));
    let mapped = driver.mem_address_reserve(2 * MIB, 0).unwrap();
    let handle = driver.mem_create(2 * MIB, &HandleProperties::on(D0)).unwrap();
    driver.mem_map(mapped, 2 * MIB, 0, handle).unwrap();
    for (kind, at) in plain {
        assert_eq!((driver.mem_free(D0, kind, ordered), driver.mem_free(D0, kind, mapped)), (refused, refused));
        assert_eq!(driver.mem_free_async(D0, at, stream), refused);
        for (other, _) in plain.into_iter().filter(|&(other, _)| other != kind) {
            assert_eq!(driver.mem_free(D0, other, at), refused);
        }
        assert_eq!(driver.mem_unmap(at, 2 * MIB), refused);
    }
    assert_eq!((driver.mem_free_async(D0, mapped, stream), driver.mem_unmap(ordered, 2 * MIB)), (refused, refused));
    assert_eq!(driver.mem_free_async(D1, ordered, stream), refused, "another device's");
    let report = driver.audit().unwrap_err();
    assert!(report.contains("300 bytes of Device memory of device 0 at") && report.contains("in the order of a stream"), "{report}");
    driver.mem_free_async(D0, ordered, stream).unwrap();
    plain.into_iter().for_each(|(kind, at)| driver.mem_free(D0, kind, at).unwrap());
    driver.mem_unmap(mapped, 2 * MIB).unwrap();
    driver.mem_release(handle).unwrap();
    driver.mem_address_free(mapped, 2 * MIB).unwrap();
    driver.audit().unwrap();
}

#[test]
fn a_device_without_pools_has_no_memory_in_a_streams_order() {
    let mut config = small();
    config.devices[0].properties.memory_pools = false;
    let driver = SimDriver::new(config);
    let refused = CuResult::ERROR_NOT_SUPPORTED;
    assert_eq!(driver.mem_alloc_async(D0, 300, StreamHandle::LEGACY), Err(refused));
    assert_eq!(driver.mem_free_async(D0, DevicePtr::new(4096), StreamHandle::LEGACY), Err(refused));
    assert_eq!(driver.mem_pool_threshold(D0, 0), Err(refused));
    driver.audit().unwrap();
}

#[test]
fn what_is_refused_costs_nothing_and_what_works_costs_the_same_whatever_the_size() {
    let driver = SimDriver::new(small());
    let stream = StreamHandle::LEGACY;
    let cost = |work: &mut dyn FnMut()| {
        let before = driver.modelled_ns().unwrap();
        work();
        driver.modelled_ns().unwrap() - before
    };
    for bytes in [1, 64 * 1024, 64 * MIB] {
        let mut at = DevicePtr::NULL;
        assert_eq!(cost(&mut || at = driver.mem_alloc_async(D0, bytes, stream).unwrap()), 750);
        assert_eq!(cost(&mut || driver.mem_free_async(D0, at, stream).unwrap()), 480);
        assert_eq!(cost(&mut || assert!(driver.mem_free_async(D0, at, stream).is_err())), 0);
    }
    assert_eq!((driver.mem_alloc_async(D0, 0, stream), driver.mem_free_async(D0, DevicePtr::NULL, stream)), (Ok(DevicePtr::NULL), Ok(())));
    assert_eq!(cost(&mut || assert_eq!(driver.mem_alloc_async(D0, 65 * MIB, stream), Err(CuResult::ERROR_OUT_OF_MEMORY))), 0);
    driver.audit().unwrap();
}

#[test]
fn a_planned_fault_of_a_call_in_a_streams_order_has_no_effect() {
    let driver = SimDriver::new(small());
    let stream = StreamHandle::LEGACY;
    driver.fail(Call::MemAllocAsync, 0, CuResult::ERROR_UNKNOWN);
    assert_eq!(driver.mem_alloc_async(D0, 300, stream), Err(CuResult::ERROR_UNKNOWN));
    driver.audit().unwrap();
    let at = driver.mem_alloc_async(D0, 300, stream).unwrap();
    driver.fail(FaultTarget::MemoryCalls, 0, CuResult::ERROR_UNKNOWN);
    assert_eq!(driver.mem_free_async(D0, at, stream), Err(CuResult::ERROR_UNKNOWN));
    driver.mem_free_async(D0, at, stream).unwrap();
    assert_eq!((driver.calls(Call::MemAllocAsync), driver.calls(Call::MemFreeAsync)), (2, 2));
    driver.audit().unwrap();
}

/// The meter counts such memory as any other.
#[test]
fn the_meter_counts_memory_in_a_streams_order() {
    let (sim, stream) = stalled(small());
    let meter = Meter::new(sim.clone());
    let at = meter.mem_alloc_async(D0, MIB, stream).unwrap();
    assert!(meter.mem_alloc_async(D0, 65 * MIB, stream).is_err());
    assert_eq!((meter.reserved_bytes(), meter.peak_reserved_bytes()), (MIB, MIB));
    assert_eq!(meter.mem_free(D0, MemoryKind::Device, at), Err(CuResult::ERROR_INVALID_VALUE));
    assert_eq!(meter.reserved_bytes(), MIB, "a refused free changes nothing");
    meter.mem_free_async(D0, at, stream).unwrap();
    assert_eq!((meter.reserved_bytes(), meter.mem_pool_threshold(D0, 0)), (0, Ok(())));
    let counts = meter.counts();
    let of = |call| counts.get(call);
    assert_eq!((of(Call::MemAllocAsync), of(Call::MemFreeAsync), of(Call::MemPoolThreshold)), (2, 1, 1));
}

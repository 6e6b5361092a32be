//! Contexts: the calling thread keeps its own, whatever is done.

use crate::support::{Fake, in_children};
use std::ffi::c_int;
use std::sync::Barrier;
use std::thread;
use vrampool::driver::cuda::CudaDriver;
use vrampool::driver::{Driver, HandleProperties, MemoryKind, StreamFlags, StreamHandle};
use vrampool::units::{DeviceId, MIB};
use vrampool::{Device, Pool};

/// Whether the memory of a pool of the first device is mapped rather than allocated.
fn pool_maps(pool: &Pool) -> bool {
    let properties = Device::first().and_then(|device| device.properties()).unwrap();
    pool.kind() == MemoryKind::Device && properties.virtual_memory_management
}

/// The program's own use of the driver.
struct Program(Fake);

impl Program {
    fn retain(&self, device: c_int) -> u64 {
        let mut context = 0;
        // SAFETY: cuDevicePrimaryCtxRetain, of this type; the result goes to a local.
        let code = unsafe {
            self.0.function::<unsafe extern "C" fn(*mut u64, c_int) -> c_int>("cuDevicePrimaryCtxRetain")(&raw mut context, device)
        };
        assert_eq!(code, 0);
        context
    }

    fn release(&self, device: c_int) {
        // SAFETY: cuDevicePrimaryCtxRelease_v2, of this type.
        let code = unsafe { self.0.function::<unsafe extern "C" fn(c_int) -> c_int>("cuDevicePrimaryCtxRelease_v2")(device) };
        assert_eq!(code, 0);
    }

    fn push(&self, context: u64) {
        // SAFETY: cuCtxPushCurrent_v2, of this type.
        let code = unsafe { self.0.function::<unsafe extern "C" fn(u64) -> c_int>("cuCtxPushCurrent_v2")(context) };
        assert_eq!(code, 0);
    }

    fn pop(&self) -> u64 {
        let mut context = 0;
        // SAFETY: cuCtxPopCurrent_v2, of this type; the result goes to a local.
        let code = unsafe { self.0.function::<unsafe extern "C" fn(*mut u64) -> c_int>("cuCtxPopCurrent_v2")(&raw mut context) };
        assert_eq!(code, 0);
        context
    }
}

/// A call of each sort on a device, those that fail too; `look` after each.
fn every_sort_of_call(driver: &CudaDriver, device: DeviceId, look: &dyn Fn(&str)) {
    let other = DeviceId(1 - device.0);
    for kind in [MemoryKind::Device, MemoryKind::Pinned, MemoryKind::Managed] {
        let at = driver.mem_alloc(device, kind, 4096).unwrap();
        look("mem_alloc");
        assert!(driver.mem_alloc(device, kind, 1 << 50).is_err());
        look("mem_alloc refused");
        driver.mem_free(device, kind, at).unwrap();
        look("mem_free");
        assert!(driver.mem_free(device, kind, at).is_err());
        look("mem_free refused");
    }
    driver.memory_info(device).unwrap();
    driver.device_properties(device).unwrap();
    driver.can_access_peer(device, other).unwrap();
    look("questions");
    let handle = driver.mem_create(2 * MIB, &HandleProperties::on(device)).unwrap();
    driver.mem_release(handle).unwrap();
    look("virtual memory");
    for stream in [StreamHandle::DEFAULT, StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
        assert!(driver.stream_query(device, stream).unwrap());
        look("a default stream");
        assert!(driver.stream_destroy(stream).is_err());
        look("stream_destroy refused");
    }
    let stream = driver.stream_create(device, StreamFlags::NonBlocking).unwrap();
    look("stream_create");
    let event = driver.event_create(device).unwrap();
    look("event_create");
    driver.event_record(device, event, stream).unwrap();
    driver.stream_wait_event(device, StreamHandle::LEGACY, event).unwrap();
    driver.launch_host_function(device, stream, Box::new(|| ())).unwrap();
    driver.stream_synchronize(device, stream).unwrap();
    look("work");
    assert!(driver.event_query(event).unwrap());
    driver.event_synchronize(event).unwrap();
    driver.event_destroy(event).unwrap();
    driver.stream_destroy(stream).unwrap();
    look("the end of both");
    assert!(driver.module_load(device, b"garbage\0").is_err());
    look("module_load refused");
    driver.context_synchronize(device).unwrap();
    look("context_synchronize");
    assert!(driver.memory_info(DeviceId(9)).is_err());
    look("no device");
}

#[test]
fn the_calling_threads_context_is_untouched() {
    in_children(&["devices=2"], || {
        let driver = CudaDriver::load().unwrap();
        let program = Program(Fake::of_child());
        let contexts = [program.retain(0), program.retain(1)];
        for device in [0, 1] {
            for own in [&[][..], &contexts[..1], &contexts[1..], &contexts, &[contexts[1], contexts[0], contexts[1]]] {
                own.iter().for_each(|&context| program.push(context));
                let before = program.0.context();
                every_sort_of_call(&driver, DeviceId(device), &|what| assert_eq!(program.0.context(), before, "{what} with {own:?}"));
                for &context in own.iter().rev() {
                    assert_eq!(program.pop(), context);
                }
            }
        }
        assert_eq!(program.0.context(), (0, 0));
    });
}

#[test]
fn the_context_comes_back_after_every_failure_of_a_call_about_contexts() {
    in_children(&["devices=2"], || {
        let driver = CudaDriver::load().unwrap();
        let program = Program(Fake::of_child());
        let own = program.retain(1);
        program.push(own);
        driver.memory_info(DeviceId(0)).unwrap();
        for call in ["cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuMemGetInfo_v2"] {
            program.0.fail(call, 0, 4321);
            let info = driver.memory_info(DeviceId(0));
            assert_eq!(program.0.clear(), 0, "{call} was not called");
            // What is current cannot be told, and then nothing is lost by pushing.
            assert_eq!(info.is_ok(), call == "cuCtxGetCurrent", "{call}");
            assert!(info.err().is_none_or(|code| code.0 == 4321), "{call}");
            assert_eq!(program.0.context(), (own, 1), "{call}");
        }
        program.0.poison(0, 719);
        assert_eq!(driver.memory_info(DeviceId(0)).map_err(|code| code.0), Err(719));
        assert_eq!(program.0.context(), (own, 1));
        assert!(driver.memory_info(DeviceId(1)).is_ok(), "the other device is sound");
    });
}

#[test]
fn each_devices_memory_is_on_that_device_whichever_is_current() {
    in_children(&["devices=2", "devices=2,vmm=0"], || {
        let driver = CudaDriver::load().unwrap();
        let program = Program(Fake::of_child());
        // SAFETY: the type that the control has.
        let held = |device| unsafe { program.0.function::<extern "C" fn(u32) -> u64>("fake_held_bytes")(device) };
        let contexts = [program.retain(0), program.retain(1)];
        for own in [0, 1] {
            program.push(contexts[own]);
            for device in [0, 1] {
                let pool = Pool::builder().device(Device::new(driver.clone(), DeviceId(device)).unwrap()).build().unwrap();
                let block = pool.allocate_buffer(MIB).unwrap();
                assert!(held(device) >= MIB && held(1 - device) == 0, "device {device} with {own} current");
                // What is freed with the other current is freed all the same.
                program.push(contexts[1 - own]);
                drop(block);
                drop(pool);
                program.pop();
                assert_eq!((held(0), held(1)), (0, 0));
            }
            assert_eq!(program.pop(), contexts[own]);
        }
    });
}

#[test]
fn a_primary_context_stays_while_the_driver_uses_it() {
    in_children(&["devices=2", "devices=2,vmm=0"], || {
        let program = Program(Fake::of_child());
        let pool = Pool::builder().device(Device::first().unwrap()).build().unwrap();
        let block = pool.allocate_buffer(MIB).unwrap();
        let context = program.retain(0);
        program.push(context);
        program.release(0);
        // Virtual memory management belongs to no context: such a pool goes on where the program's was the last reference.
        let needs_context = !pool_maps(&pool);
        assert_eq!(program.0.references(0), u32::from(needs_context));
        let more = pool.allocate_buffer(2 * MIB).unwrap();
        drop((block, more));
        pool.trim(0).unwrap();
        assert_eq!(program.0.context(), (context, 1));
        assert_eq!(program.0.references(1), 0, "no context of a device that nobody uses");
    });
}

#[test]
fn a_context_is_retained_once_by_however_many_threads() {
    in_children(&["devices=2"], || {
        let driver = CudaDriver::load().unwrap();
        let fake = Fake::of_child();
        let barrier = Barrier::new(8);
        thread::scope(|scope| {
            for index in 0..8 {
                let (driver, barrier, fake) = (&driver, &barrier, &fake);
                scope.spawn(move || {
                    barrier.wait();
                    driver.memory_info(DeviceId(index % 2)).unwrap();
                    assert_eq!(fake.context(), (0, 0));
                });
            }
        });
        assert_eq!((fake.references(0), fake.references(1), fake.calls("cuDevicePrimaryCtxRetain")), (1, 1, 2));
    });
}

/// A pool that maps its memory needs no context, and makes none; its memory is the device's all the same, in whatever
/// context the program makes later.
#[test]
fn memory_that_was_mapped_without_a_context_is_used_with_one() {
    in_children(&["devices=2"], || {
        let program = Program(Fake::of_child());
        let driver = CudaDriver::load().unwrap();
        let pool = Pool::builder().device(Device::first().unwrap()).build().unwrap();
        let block = pool.allocate_buffer(3 * MIB).unwrap();
        assert_eq!((program.0.references(0), program.0.calls("cuDevicePrimaryCtxRetain"), program.0.context()), (0, 0, (0, 0)));
        // The binding's own calls on the device.
        let device = DeviceId(0);
        let stream = driver.stream_create(device, StreamFlags::NonBlocking).unwrap();
        let event = driver.event_create(device).unwrap();
        driver.memset_d8_async(device, block.address(), 0x5a, block.size(), stream).unwrap();
        driver.event_record(device, event, stream).unwrap();
        driver.event_synchronize(event).unwrap();
        let mut read = [0; 8];
        driver.memcpy_device_to_host(device, &mut read, block.address().offset(3 * MIB - 8)).unwrap();
        assert_eq!((read, program.0.references(0)), ([0x5a; 8], 1));
        // More is mapped with the context there, and is the same memory.
        let more = pool.allocate_buffer(20 * MIB).unwrap();
        driver.memcpy_async(device, more.address().offset(19 * MIB), block.address(), MIB, stream).unwrap();
        driver.stream_synchronize(device, stream).unwrap();
        driver.event_destroy(event).unwrap();
        driver.stream_destroy(stream).unwrap();
        drop((block, more, pool));
        assert_eq!(program.0.outstanding(), "primary context of device 0: 1 references\n");
    });
}

/// A reset takes a device's memory along, and no other's.
#[test]
fn a_context_that_is_gone_is_no_matter_to_another_device() {
    in_children(&["devices=2", "devices=2,vmm=0"], || {
        let program = Program(Fake::of_child());
        let driver = CudaDriver::load().unwrap();
        let pool_on = |device| Pool::builder().device(Device::new(driver.clone(), DeviceId(device)).unwrap()).build().unwrap();
        let pools = [pool_on(0), pool_on(1)];
        let buffers = pools.each_ref().map(|pool| [300, 3 * MIB].map(|size| pool.allocate_buffer(size).unwrap()));
        let own = program.retain(1);
        program.push(own);
        program.0.poison(0, 709);
        let [lost, kept] = buffers;
        drop(lost);
        assert_eq!(pools[0].trim(0).unwrap(), 0, "what is gone is not held");
        assert_eq!(program.0.context(), (own, 1));
        pools.iter().for_each(|pool| pool.check().unwrap());
        let more = pools[1].allocate_buffer(40 * MIB).unwrap();
        assert_eq!(pools[1].statistics().live_blocks, 3);
        drop((kept, more));
        assert_eq!(pools[1].trim(0).unwrap(), 0);
        drop(pools);
        assert_eq!((program.pop(), program.0.context()), (own, (0, 0)));
    });
}

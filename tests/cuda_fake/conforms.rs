//! The conformance suite and a pool's work, on every profile, through the real binding.

use crate::library;
use crate::support::{Fake, in_children, in_children_with};
use std::sync::Arc;
use vrampool::driver::conformance::{self, Report};
use vrampool::driver::cuda::CudaDriver;
use vrampool::driver::{Driver, HandleTypes, MemoryKind, Meter, StreamHandle};
use vrampool::error::CuResult;
use vrampool::units::{DeviceId, KIB, MIB};
use vrampool::{Device, DeviceBuffer, Pool};

/// Machines with every function in the library.
const WHOLE: &[&str] = &[
    "",
    "backed=0",
    "devices=2",
    "devices=2,peers=0",
    "granularity=64KiB",
    "granularity=32MiB",
    "vmm=0",
    "managed=0",
    "rdma=0",
    "shareable=none",
    "shareable=fd",
    "imex=0",
    "pools=0",
    "profile=mig,devices=2",
    "profile=wsl",
    "profile=jetson",
    "mps=128MiB",
    "version=12000",
];

/// Drivers of older versions, and what their libraries lack is really missing.
const OLD: &[&str] = &["version=10020", "version=11010", "version=11020"];

fn assert_passes(report: &Report, at_least: usize, what: &str) {
    assert!(report.failures().is_empty(), "{what}:\n{report}");
    assert!(report.checks().len() >= at_least, "{what}: only {} checks", report.checks().len());
}

/// The process's driver keeps the contexts that it retained, once each, and nothing else.
fn assert_only_contexts(left: &str) {
    assert!(left.lines().all(|line| line.starts_with("primary context of device") && line.ends_with(": 1 references")), "{left}");
}

/// The suite on every device, once with no context current and once with another device's.
fn conform() {
    let fake = Fake::of_child();
    let driver = CudaDriver::load().unwrap();
    let binding = driver.binding().to_string();
    assert!(binding.ends_with(&library::full().display().to_string()), "{binding}");
    assert_eq!(binding.starts_with("linked"), cfg!(vrampool_cuda = "linked"), "{binding}");
    for device in (0..driver.device_count().unwrap()).map(DeviceId) {
        let properties = driver.device_properties(device).unwrap();
        let at_least = if properties.virtual_memory_management { 200 } else { 80 };
        assert_passes(&conformance::run(&*driver, device), at_least, &format!("{properties:?}"));
    }
    assert_eq!(fake.context(), (0, 0));
    assert_only_contexts(&fake.outstanding());
}

#[test]
fn every_profile_conforms() {
    in_children(WHOLE, || {
        conform();
    });
}

#[test]
fn older_drivers_conform() {
    in_children_with(old_machines(), || {
        conform();
    });
}

#[test]
fn a_reduced_library_conforms() {
    let reduced = library::reduced();
    in_children_with([("version=10010", reduced), ("", reduced)], || {
        conform();
        let properties = CudaDriver::load().unwrap().device_properties(DeviceId(0)).unwrap();
        assert!(!properties.virtual_memory_management && !properties.memory_pools && !properties.stream_ids, "{properties:?}");
    });
}

#[test]
fn a_broken_context_conforms() {
    in_children(&[""], || {
        let driver = CudaDriver::load().unwrap();
        assert_passes(&conformance::run_broken(&*driver, DeviceId(0)), 30, "broken");
        assert_eq!(Fake::of_child().context(), (0, 0));
    });
}

/// What a pool does for its user: every class of size, alignments, trimming, and all of it back.
fn pool_works(device: Device, kind: MemoryKind) {
    let page = Pool::builder().device(device.clone()).kind(kind).build().unwrap().page_bytes();
    let pool = Pool::builder().device(device).kind(kind).maximum((3 * page).clamp(24 * MIB, 96 * MIB)).build().unwrap();
    let mut live: Vec<DeviceBuffer> = Vec::new();
    for round in 0..3 {
        for size in [1, 255, 256, 300, 4 * KIB, 64 * KIB, 64 * KIB + 1, 300 * KIB, MIB] {
            live.push(pool.allocate_buffer(size + round).unwrap());
        }
        let aligned = pool.allocate_buffer_aligned(5000, MIB).unwrap();
        assert!(aligned.address().is_aligned_to(MIB));
        live.push(aligned);
        pool.check().unwrap();
        let mut ranges: Vec<(u64, u64)> = live.iter().map(|buffer| (buffer.address().address(), buffer.size())).collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "blocks overlap: {ranges:?}");
        let mut index = 0;
        live.retain(|_| {
            index += 1;
            index % 3 == 0
        });
        pool.trim(0).unwrap();
        pool.check().unwrap();
    }
    assert!(pool.allocate(1 << 40).unwrap_err().is_out_of_memory());
    live.clear();
    pool.trim(0).unwrap();
    assert_eq!(pool.statistics().reserved_bytes, 0);
}

fn pools_work() {
    let fake = Fake::of_child();
    let device = Device::first().unwrap();
    let properties = device.properties().unwrap();
    for kind in [MemoryKind::Device, MemoryKind::Pinned, MemoryKind::Managed] {
        if kind != MemoryKind::Managed || properties.managed_memory {
            pool_works(device.clone(), kind);
            assert_only_contexts(&fake.outstanding());
        }
    }
    assert_eq!(fake.context(), (0, 0));
}

#[test]
fn pools_work_on_every_profile() {
    in_children(WHOLE, || {
        pools_work();
    });
}

#[test]
fn pools_work_on_older_drivers() {
    in_children_with(old_machines(), || {
        pools_work();
    });
}

fn old_machines() -> Vec<(&'static str, &'static std::path::Path)> {
    if crate::support::is_child() {
        return Vec::new();
    }
    let symbols = Fake::open(library::full()).symbols();
    let machine = |profile: &'static str| {
        let version: i32 = profile.trim_start_matches("version=").parse().unwrap();
        let later: Vec<&str> = symbols.iter().filter(|(_, since)| *since > version).map(|(name, _)| name.as_str()).collect();
        assert!(later.contains(&"cuStreamGetId"));
        let path: &std::path::Path = Box::leak(library::without(&later, &format!("fake-cuda-{version}")).into_boxed_path());
        (profile, path)
    };
    OLD.iter().map(|profile| machine(profile)).collect()
}

#[test]
fn the_meter_over_the_binding_ends_at_zero() {
    in_children(&["", "vmm=0"], || {
        let meter = Arc::new(Meter::new(CudaDriver::load().unwrap()));
        pool_works(Device::new(meter.clone(), DeviceId(0)).unwrap(), MemoryKind::Device);
        assert!(meter.reserved_bytes() == 0 && meter.peak_reserved_bytes() > 0);
    });
}

#[test]
fn a_limit_of_the_multi_process_service_is_out_of_memory() {
    in_children(&["mps=128MiB", "mps=128MiB,vmm=0"], || {
        let device = Device::first().unwrap();
        let pool = Pool::builder().device(device.clone()).build().unwrap();
        let info = device.driver().memory_info(DeviceId(0)).unwrap();
        assert!(info.free_bytes > 512 * MIB, "the driver does not know of the limit");
        let error = pool.allocate(192 * MIB).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        let block = pool.allocate_buffer(64 * MIB).unwrap();
        block.free().unwrap();
        pool.check().unwrap();
    });
}

/// What a pool's memory is to be made for reaches the driver, and what it refuses is said when the pool is built.
#[test]
fn pools_are_made_for_what_they_ask() {
    let profiles = ["", "rdma=0", "shareable=fd", "imex=0", "version=12000", "vmm=0"];
    in_children(&profiles, || {
        let fake = Fake::of_child();
        let profile = std::env::var("VRAMPOOL_FAKE").unwrap();
        let [rdma, fd, fabric] = ["rdma=true", "shareable=fd", "shareable=fd+fabric"].map(|config| {
            let pool = Pool::builder().configure(config).unwrap().device(Device::first().unwrap()).build()?;
            pool.allocate_buffer_contiguous(3 * MIB, 1)?.free().unwrap();
            assert_eq!(pool.config(), config);
            Ok::<_, vrampool::Error>(pool.handle_properties())
        });
        let has = |pool: &Result<_, vrampool::Error>, without: &[&str]| match pool {
            Ok(properties) => assert!(Option::is_some(properties) && !without.contains(&profile.as_str()), "{profile}"),
            Err(error) => assert!(error.is_unavailable() && without.contains(&profile.as_str()), "{profile}: {error}"),
        };
        has(&rdma.map(|has| has.filter(|has| has.rdma && has.shareable.is_empty())), &["rdma=0", "vmm=0"]);
        has(&fd.map(|has| has.filter(|has| !has.rdma && has.shareable == HandleTypes::FILE_DESCRIPTOR)), &["vmm=0"]);
        has(&fabric, &["shareable=fd", "imex=0", "version=12000", "vmm=0"]);
        assert_only_contexts(&fake.outstanding());
    });
}

/// A lack of memory that was got over is over: no later call, the program's own either, hears of it.
#[test]
fn a_refusal_leaves_nothing_for_the_next_call_to_report() {
    in_children(&["", "vmm=0"], || {
        let fake = Fake::of_child();
        let driver = CudaDriver::load().unwrap();
        let pool = Pool::builder().device(Device::first().unwrap()).build().unwrap();
        for round in 0..3 {
            let half = pool.allocate_buffer(512 * MIB).unwrap();
            let error = pool.allocate(768 * MIB).unwrap_err();
            assert!(error.is_out_of_memory() && error.code() == Some(CuResult::ERROR_OUT_OF_MEMORY), "{error}");
            // The program's own calls, and the binding's.
            let mut ordinal = -1;
            // SAFETY: cuDeviceGet, of this type; the result goes to a local.
            let code = unsafe { fake.function::<unsafe extern "C" fn(*mut i32, i32) -> i32>("cuDeviceGet")(&raw mut ordinal, 0) };
            assert_eq!((code, fake.context()), (0, (0, 0)), "round {round}");
            driver.context_synchronize(DeviceId(0)).unwrap();
            driver.memory_info(DeviceId(0)).unwrap();
            driver.memset_d8_async(DeviceId(0), half.address(), 1, 512 * MIB, StreamHandle::LEGACY).unwrap();
            driver.stream_synchronize(DeviceId(0), StreamHandle::LEGACY).unwrap();
            drop(half);
            // The same request, once there is room for it.
            pool.allocate_buffer(768 * MIB).unwrap().free().unwrap();
            pool.check().unwrap();
            driver.context_synchronize(DeviceId(0)).unwrap();
            pool.trim(0).unwrap();
        }
    });
}

/// A block of many handles is one range to whoever uses it.
#[test]
fn a_block_of_many_handles_is_one_range() {
    in_children(&["", "granularity=64KiB", "granularity=32MiB", "devices=2"], || {
        let fake = Fake::of_child();
        let driver = CudaDriver::load().unwrap();
        let pool = Pool::builder().device(Device::first().unwrap()).build().unwrap();
        let size = 100 * MIB + 12;
        let [from, to] = [(); 2].map(|()| pool.allocate_buffer(size).unwrap());
        assert!(fake.calls("cuMemCreate") >= 6, "the test wants several handles in each");
        let (device, stream) = (DeviceId(0), StreamHandle::LEGACY);
        driver.memset_d8_async(device, from.address(), 0x5a, size, stream).unwrap();
        driver.memset_d8_async(device, from.address().offset(50 * MIB), 0xa5, 50 * MIB, stream).unwrap();
        driver.memcpy_async(device, to.address(), from.address(), size, stream).unwrap();
        let mut read = vec![0; size as usize];
        driver.memcpy_device_to_host(device, &mut read, to.address()).unwrap();
        let (left, rest) = read.split_at(50 << 20);
        let (middle, right) = rest.split_at(50 << 20);
        assert!(left.iter().all(|&byte| byte == 0x5a) && middle.iter().all(|&byte| byte == 0xa5) && *right == [0x5a; 12]);
    });
}

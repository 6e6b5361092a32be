//! Drivers that are not there, or not all of them.

use crate::library;
use crate::support::{Fake, in_children};
use std::path::{Path, PathBuf};
use std::{env, fs};
use vrampool::driver::conformance;
use vrampool::driver::cuda::CudaDriver;
use vrampool::driver::{Driver, MemoryKind};
use vrampool::units::{DeviceId, MIB};
use vrampool::{Device, Error, Pool};

/// What is said must have these words in it.
fn assert_unavailable<T: std::fmt::Debug>(result: Result<T, Error>, words: &[&str]) {
    let error = result.expect_err("there is no driver");
    assert!(error.is_unavailable(), "{error}");
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

#[test]
fn no_device_and_a_stub_say_so() {
    in_children(&["devices=0", "stub=1"], || {
        let words: &[&str] = match env::var("VRAMPOOL_FAKE").unwrap().as_str() {
            "devices=0" => &["no CUDA device", "CUDA_ERROR_NO_DEVICE (100)"],
            _ => &["no CUDA driver", "stub", "CUDA_ERROR_STUB_LIBRARY (34)"],
        };
        for _ in 0..2 {
            assert_unavailable(CudaDriver::load(), words);
            assert_unavailable(Device::first(), words);
            assert_unavailable(Pool::builder().build(), words);
        }
    });
}

#[test]
fn a_driver_that_cannot_start_says_why_and_may_start_later() {
    in_children(&[""], || {
        let fake = Fake::of_child();
        for (call, code) in [("cuInit", 999), ("cuInit", 12_345), ("cuInit", 802), ("cuDeviceGetCount", 3)] {
            fake.fail(call, 0, code);
            assert_unavailable(CudaDriver::load(), &[call, &code.to_string()]);
        }
        assert_eq!(fake.outstanding(), "");
        assert!(CudaDriver::load().is_ok());
    });
}

#[test]
fn no_library_says_what_was_tried() {
    // The library that is opened by name is none of the process's own: no child is needed.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-cuda");
    fs::create_dir_all(&folder).unwrap();
    let empty = folder.join(library::NAME);
    fs::write(&empty, "").unwrap();
    for path in [folder.join("nowhere.so"), empty, folder] {
        assert_unavailable(CudaDriver::open(&path), &["no CUDA driver", &path.display().to_string()]);
    }
}

/// The driver's own stream-ordered allocator.
const POOL_FUNCTIONS: [&str; 4] = ["cuMemAllocAsync", "cuMemFreeAsync", "cuDeviceGetDefaultMemPool", "cuMemPoolSetAttribute"];

/// The pool and the suite on a library without one function.
fn works_without(function: &str, path: &PathBuf) {
    let driver = CudaDriver::open(path).unwrap_or_else(|error| panic!("without {function}: {error}"));
    let properties = driver.device_properties(DeviceId(0)).unwrap();
    assert_eq!(properties.stream_ids, function != "cuStreamGetId", "without {function}");
    let is_of_pools = POOL_FUNCTIONS.contains(&function);
    assert_eq!(properties.memory_pools, !is_of_pools, "without {function}");
    assert_eq!(properties.virtual_memory_management, is_of_pools || !function.starts_with("cuMem"), "without {function}");
    if properties.virtual_memory_management {
        let report = conformance::run(&*driver, DeviceId(0));
        assert!(report.failures().is_empty(), "without {function}:\n{report}");
    }
    let pool = Pool::builder().device(Device::new(driver, DeviceId(0)).unwrap()).kind(MemoryKind::Device).build().unwrap();
    pool.allocate_buffer(3 * MIB).unwrap().free().unwrap();
    drop(pool);
    assert_eq!(Fake::open(path).outstanding(), "", "without {function}");
}

#[test]
fn every_function_may_be_missing() {
    // Each library is a machine with addresses of its own, and stays: small ones fit where addresses are few.
    in_children(&["memory=256MiB"], || {
        let fake = Fake::of_child();
        // What the binding never calls is not missed.
        let unused = ["cuCtxGetDevice", "cuCtxSetCurrent", "cuGetErrorName", "cuGetErrorString", "cuGetProcAddress", "cuGetProcAddress_v2"];
        let mut missed = 0;
        for (function, since) in fake.symbols() {
            let path = library::without(&[&function], &format!("fake-cuda-without-{function}"));
            let needed = since <= 10_010 && !unused.contains(&function.as_str());
            if needed {
                assert_unavailable(CudaDriver::open(&path), &[&function, "lacks"]);
                missed += 1;
            } else {
                works_without(&function, &path);
            }
        }
        assert!(missed > 35, "only {missed} functions are needed");
    });
}

#[test]
fn a_driver_opened_apart_gives_its_contexts_back() {
    in_children(&["devices=2"], || {
        let fake = Fake::of_child();
        for _ in 0..2 {
            let driver = CudaDriver::open(library::full()).unwrap();
            driver.memory_info(DeviceId(1)).unwrap();
            assert_eq!(fake.references(1), 1);
            drop(driver);
            assert_eq!((fake.references(1), fake.outstanding()), (0, String::new()));
        }
    });
}

//! Forks, and the end of the process.

use crate::support::{Fake, in_children, report_done};
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::{fs::File, hint, mem, process, thread};
use vrampool::driver::cuda::CudaDriver;
use vrampool::driver::{Driver, MemoryKind, Meter, PhysicalHandle};
use vrampool::error::CuResult;
use vrampool::units::{DeviceId, DevicePtr, MIB};
use vrampool::{Device, DeviceBuffer, Pool, Reservation};

const KINDS: [MemoryKind; 3] = [MemoryKind::Device, MemoryKind::Pinned, MemoryKind::Managed];

/// Forks, runs `work` in the child, and returns what it says. A child that hangs is ended, and has said nothing.
fn fork(work: impl FnOnce() -> String) -> String {
    let mut ends = [0; 2];
    // SAFETY: room for two descriptors (pipe(2)).
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: the child allocates, which the C library allows after a fork, and takes no lock that another thread may have
    // held but those that are tested; it leaves by _exit.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: no memory is touched.
            unsafe { libc::alarm(60) };
            let said = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(|_| "panicked".into());
            // SAFETY: the text is valid for its length; the process ends here without running anybody's handlers.
            unsafe {
                libc::write(ends[1], said.as_ptr().cast(), said.len());
                libc::_exit(0)
            }
        }
        child => {
            assert!(child > 0, "no process could be made");
            // SAFETY: both are this process's own, and nobody else's.
            let [mut read, write] = ends.map(|end| File::from(unsafe { OwnedFd::from_raw_fd(end) }));
            drop(write);
            let mut said = String::new();
            read.read_to_string(&mut said).expect("text");
            let mut status = 0;
            // SAFETY: the status goes to a local.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child ended with {status:#x}");
            said
        }
    }
}

/// What a child may do with its parent's pool: nothing reaches the driver, and all is an error or silence.
fn use_in_child(fake: &Fake, device: &Device, pool: &Pool, mut buffer: DeviceBuffer, reservation: Reservation) -> String {
    let driver = device.driver();
    let before = fake.calls("*");
    let context = fake.context();
    let grown = buffer.try_grow(MIB);
    drop(buffer);
    let mut said = String::new();
    let mut note = |what: &str, is_right: bool| {
        if !is_right {
            said.push_str(what);
            said.push('\n');
        }
    };
    for size in [1, 300, 4096, 64 << 10, MIB, 4 * MIB, 64 * MIB] {
        note("allocate is no error", pool.allocate(size).is_err_and(|error| !error.is_out_of_memory()));
        note("allocate_buffer is no error", pool.allocate_buffer(size).is_err());
    }
    note("growing is no error", grown.is_err_and(|error| error.code() == Some(CuResult::ERROR_DEINITIALIZED)));
    note("a reservation is no error", pool.reserve(MIB).is_err() && pool.reserve(0).is_err());
    note("a draw is no error", reservation.allocate(1).is_err_and(|error| !error.is_out_of_memory()));
    note("something is left of a reservation", reservation.remaining() == 0);
    drop(reservation);
    let statistics = pool.statistics();
    note("something is counted", statistics.reserved_bytes == 0 && statistics.live_blocks == 0 && statistics.allocations == 0);
    note("the classes are not there", !statistics.classes.is_empty());
    note("a check fails", pool.check() == Ok(()));
    note("a trim leaves something", pool.trim(0).is_ok_and(|held| held == 0));
    note("it cannot be printed", format!("{pool:?} {:?}", pool.clone()).contains("Pool"));
    note("it has another device", pool.device() == DeviceId(0) && pool.page_bytes() >= 2 * MIB);
    let here = Device::new(driver.clone(), DeviceId(0));
    note("a device is no error", here.is_err());
    note("build on a known device is no error", Pool::builder().device(device.clone()).initial(MIB).build().is_err());
    // SAFETY: no buffer is made.
    let raw = unsafe { DeviceBuffer::from_raw(pool, DevicePtr::new(4096)) };
    note("a buffer of an address is no error", raw.is_err_and(|error| error.code() == Some(CuResult::ERROR_DEINITIALIZED)));
    note("load is no error", CudaDriver::load().is_err_and(|error| error.is_unavailable()));
    note("first is no error", Device::first().is_err());
    note("build is no error", Pool::builder().build().is_err());
    note("the driver was called", fake.calls("*") == before);
    note("the context is another", fake.context() == context);
    said
}

fn a_buffer_of(pool: &Pool) -> DeviceBuffer {
    pool.allocate_buffer(300).unwrap()
}

#[test]
fn a_forked_child_leaves_the_driver_alone_and_the_parent_unharmed() {
    in_children(&["", "vmm=0", "devices=2"], || {
        let fake = Fake::of_child();
        let device = Device::first().unwrap();
        for kind in KINDS {
            let pool = Pool::builder().device(device.clone()).kind(kind).build().unwrap();
            let mine = a_buffer_of(&pool);
            let live = pool.statistics().live_bytes;
            let buffer = a_buffer_of(&pool);
            let reservation = pool.reserve(MIB).unwrap();
            let calls = fake.calls("*");
            let said = fork(|| {
                // SAFETY: the child's copies; the parent drops its own.
                let (copy, reserved) = unsafe { (std::ptr::read(&raw const buffer), std::ptr::read(&raw const reservation)) };
                let said = use_in_child(&fake, &device, &pool, copy, reserved);
                // The pool's end is silent, too.
                let before = fake.calls("*");
                // SAFETY: the child's copy of the pool, which is not used again.
                drop(unsafe { std::ptr::read(&raw const pool) });
                if fake.calls("*") == before { said } else { format!("{said}the pool's end called the driver\n") }
            });
            assert_eq!(said, "", "{kind:?}");
            assert_eq!(fake.calls("*"), calls, "the parent's log");
            drop(buffer);
            assert_eq!(pool.statistics().live_bytes, live);
            drop((mine, reservation));
            pool.check().unwrap();
            pool.trim(0).unwrap();
            drop(pool);
            let left = fake.outstanding();
            assert!(["", "primary context of device 0: 1 references\n"].contains(&left.as_str()), "{kind:?}: {left}");
        }
    });
}

#[test]
fn a_fork_while_other_threads_hold_the_pools_lock_does_not_hang() {
    in_children(&["backed=0", "backed=0,vmm=0"], || {
        let fake = Fake::of_child();
        let device = Device::first().unwrap();
        let pool = Pool::builder().device(device.clone()).build().unwrap();
        let stop = AtomicBool::new(false);
        let busy = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::SeqCst) {
                        let buffers = [300, 5000, 100 << 10, 3 * MIB].map(|size| pool.allocate_buffer(size).unwrap());
                        drop(buffers);
                        pool.trim(0).unwrap();
                        busy.store(true, Ordering::SeqCst);
                    }
                });
            }
            while !busy.load(Ordering::SeqCst) {
                hint::spin_loop();
            }
            for round in 0..100 {
                let (buffer, reservation) = (a_buffer_of(&pool), pool.reserve(MIB).unwrap());
                let said = fork(|| {
                    // SAFETY: the child's copies; the parent drops its own.
                    let (copy, reserved) = unsafe { (std::ptr::read(&raw const buffer), std::ptr::read(&raw const reservation)) };
                    // The fake's count is right in a child: its other threads are gone.
                    use_in_child(&fake, &device, &pool, copy, reserved)
                });
                assert_eq!(said, "", "round {round}");
            }
            stop.store(true, Ordering::SeqCst);
        });
        pool.check().unwrap();
    });
}

/// The count between a pool and its driver has a lock of its own.
#[test]
fn a_fork_while_other_threads_hold_the_meters_lock_does_not_hang() {
    in_children(&["backed=0", "backed=0,vmm=0"], || {
        let meter = Arc::new(Meter::new(CudaDriver::load().unwrap()));
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::SeqCst) {
                        _ = (meter.reserved_bytes(), meter.peak_reserved_bytes(), meter.reset_peak());
                    }
                });
            }
            for round in 0..100 {
                let said = fork(|| {
                    let at = DevicePtr::new(4096);
                    let answers = [
                        meter.mem_alloc(DeviceId(0), MemoryKind::Device, 1).map(drop),
                        meter.mem_free(DeviceId(0), MemoryKind::Device, at),
                        meter.mem_release(PhysicalHandle(1)),
                        meter.mem_map(at, 4096, 0, PhysicalHandle(1)),
                        meter.mem_unmap(at, 4096),
                    ];
                    meter.reset_peak();
                    let counted = (meter.reserved_bytes(), meter.peak_reserved_bytes());
                    let printed = format!("{meter:?}");
                    let is_right = answers == [Err(CuResult::ERROR_DEINITIALIZED); 5] && counted == (0, 0) && !printed.is_empty();
                    if is_right { String::new() } else { format!("{answers:?} {counted:?} {printed}") }
                });
                assert_eq!(said, "", "round {round}");
            }
            stop.store(true, Ordering::SeqCst);
        });
    });
}

#[test]
fn a_driver_first_loaded_in_a_child_works() {
    in_children(&[""], || {
        let said = fork(|| match Device::first().and_then(|device| Pool::builder().device(device).build()) {
            Ok(pool) => pool.allocate_buffer(MIB).map_or_else(|error| error.to_string(), |_| "works".into()),
            Err(error) => error.to_string(),
        });
        assert_eq!(said, "works");
        // The parent has not used the driver, and may yet.
        assert!(Device::first().is_ok());
    });
}

/// A child's own end runs the handlers that its parent registered, with the parent's pool still there.
#[test]
fn a_child_that_exits_as_usual_leaves_the_driver_alone() {
    in_children(&["", "vmm=0"], || {
        // SAFETY: a function of this program, which takes nothing and does not unwind where all is right (atexit(3)).
        assert_eq!(unsafe { libc::atexit(at_the_end) }, 0);
        // Any call would end the child.
        let fake = FAKE.get_or_init(Fake::of_child);
        fake.after_exit(2);
        let pool = Pool::builder().device(Device::first().unwrap()).build().unwrap();
        let buffer = a_buffer_of(&pool);
        LIVE.lock().unwrap().push((pool.clone(), buffer));
        let calls = fake.calls("*");
        // SAFETY: the child uses what the C library allows after a fork, and takes no lock that another thread may have held.
        let child = unsafe { libc::fork() };
        if child == 0 {
            process::exit(0);
        }
        assert!(child > 0, "no process could be made");
        let mut status = 0;
        // SAFETY: the status goes to a local.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child ended with {status:#x}");
        assert_eq!(fake.calls("*"), calls, "the parent's log");
        let live = mem::take(&mut *LIVE.lock().unwrap());
        drop(live);
        assert_eq!((pool.statistics().live_blocks, pool.check()), (0, Ok(())));
        // The handler wants something to look at.
        LIVE.lock().unwrap().push((pool.clone(), a_buffer_of(&pool)));
    });
}

/// What lives to the end of the process.
static LIVE: Mutex<Vec<(Pool, DeviceBuffer)>> = Mutex::new(Vec::new());
static FAKE: OnceLock<Fake> = OnceLock::new();

thread_local! {
    static OF_THREAD: std::cell::RefCell<Option<DeviceBuffer>> = const { std::cell::RefCell::new(None) };
}

/// Runs after the driver has gone: it was given to `atexit` before the driver was loaded.
extern "C" fn at_the_end() {
    let fake = FAKE.get().expect("set before");
    let before = fake.calls("*");
    let mut live = mem::take(&mut *LIVE.lock().unwrap());
    let refused = live.iter().all(|(pool, _)| pool.allocate_buffer(64 * MIB).is_err());
    let (pool, buffer) = live.pop().expect("filled before");
    let freed = buffer.free().is_ok() && pool.statistics().reserved_bytes == 0 && pool.check().is_ok();
    drop((live, pool));
    // What must be true is said by the line that the parent looks for.
    if refused && freed && fake.calls("*") == before {
        report_done();
    } else {
        // SAFETY: the process ends at once; this is its last handler.
        unsafe { libc::_exit(86) };
    }
}

fn live_to_the_end(mode: i32) {
    // SAFETY: a function of this program, which takes nothing and does not unwind where all is right (atexit(3)).
    assert_eq!(unsafe { libc::atexit(at_the_end) }, 0);
    let fake = FAKE.get_or_init(Fake::of_child);
    fake.after_exit(mode);
    for kind in KINDS {
        let pool = Pool::builder().device(Device::first().unwrap()).kind(kind).build().unwrap();
        let buffer = pool.allocate_buffer(3 * MIB).unwrap();
        OF_THREAD.set(Some(a_buffer_of(&pool)));
        LIVE.lock().unwrap().push((pool, buffer));
    }
    process::exit(0);
}

#[test]
fn a_pool_that_outlives_the_driver_does_not_call_it_deinitialized() {
    in_children(&["", "vmm=0"], || live_to_the_end(1));
}

#[test]
fn a_pool_that_outlives_the_driver_does_not_call_it_aborting() {
    in_children(&["", "vmm=0"], || live_to_the_end(2));
}

/// The other tests' proof: a call after the end is seen.
#[test]
fn a_driver_that_has_gone_answers_so() {
    in_children(&[""], || {
        extern "C" fn calls_after_the_end() {
            let fake = FAKE.get().expect("set before");
            // SAFETY: cuMemFree_v2, of this type.
            let code = unsafe { fake.function::<unsafe extern "C" fn(u64) -> i32>("cuMemFree_v2")(0) };
            if code == 4 {
                report_done();
            }
        }
        // SAFETY: a function of this program, which takes nothing (atexit(3)).
        assert_eq!(unsafe { libc::atexit(calls_after_the_end) }, 0);
        FAKE.get_or_init(Fake::of_child).after_exit(1);
        assert!(CudaDriver::load().unwrap().memory_info(DeviceId(0)).is_ok());
        process::exit(0);
    });
}

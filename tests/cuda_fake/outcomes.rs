//! Every function of the driver's library returning every code: what comes of it, as a table.
//!
//! The table is `outcomes.txt` beside this file: a line for each function, with what came of each code, codes of one
//! outcome together. Whatever comes, nothing may be outstanding afterwards.

use crate::library;
use crate::support::{Fake, in_children};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use vrampool::driver::cuda::CudaDriver;
use vrampool::driver::sim::BUILTIN_MODULE;
use vrampool::driver::{
    CaptureMode, Driver, DriverResult, EventHandle, KernelArgument, LaunchConfig, MemoryKind, ModuleHandle, StreamFlags, StreamHandle,
};
use vrampool::error::CuResult;
use vrampool::units::{DeviceId, MIB};
use vrampool::{Device, Error, Pool};

const DEVICE: DeviceId = DeviceId(0);
/// The codes of a driver, or a context, that has taken everything with it.
const GONE: [CuResult; 2] = [CuResult::ERROR_DEINITIALIZED, CuResult::ERROR_CONTEXT_IS_DESTROYED];
const UNKNOWN: CuResult = CuResult(12_345);

/// Takes something, uses it, and gives it back whatever came of the use; again, where the fault struck that.
fn with<T: Copy, R>(
    taken: DriverResult<T>,
    give: impl Fn(T) -> DriverResult<()>,
    work: impl FnOnce(T) -> DriverResult<R>,
) -> DriverResult<R> {
    let taken = taken?;
    let result = work(taken);
    let given = give(taken);
    if given.is_err() {
        // The fault strikes once.
        give(taken)?;
    }
    let result = result?;
    given?;
    Ok(result)
}

/// What is done must be said to be: a driver that says otherwise says so with a code.
fn ready(is_done: bool) -> DriverResult<()> {
    if is_done { Ok(()) } else { Err(CuResult::ERROR_NOT_READY) }
}

fn streams(driver: &CudaDriver) -> DriverResult<()> {
    with(
        driver.stream_create(DEVICE, StreamFlags::NonBlocking),
        |stream: StreamHandle| driver.stream_destroy(stream),
        |stream| {
            driver.stream_id(DEVICE, stream)?;
            driver.stream_capture_status(DEVICE, stream)?;
            with(
                driver.event_create(DEVICE),
                |event: EventHandle| driver.event_destroy(event),
                |event| {
                    driver.launch_host_function(DEVICE, stream, Box::new(|| ()))?;
                    driver.event_record(DEVICE, event, stream)?;
                    driver.stream_wait_event(DEVICE, StreamHandle::PER_THREAD, event)?;
                    driver.event_synchronize(event)?;
                    ready(driver.event_query(event)?)
                },
            )?;
            driver.mem_pool_threshold(DEVICE, u64::MAX)?;
            with(
                driver.mem_alloc_async(DEVICE, 4096, stream),
                |at| driver.mem_free_async(DEVICE, at, stream),
                |at| driver.memset_d8_async(DEVICE, at, 1, 4096, stream),
            )?;
            driver.stream_synchronize(DEVICE, stream)?;
            ready(driver.stream_query(DEVICE, stream)?)
        },
    )?;
    let mode = driver.thread_exchange_capture_mode(CaptureMode::Relaxed)?;
    driver.thread_exchange_capture_mode(mode)?;
    driver.context_synchronize(DEVICE)
}

fn work(driver: &CudaDriver) -> DriverResult<()> {
    let image = format!("{BUILTIN_MODULE}\0");
    with(
        driver.module_load(DEVICE, image.as_bytes()),
        |module: ModuleHandle| driver.module_unload(DEVICE, module),
        |module| {
            with(
                driver.mem_alloc(DEVICE, MemoryKind::Device, 4096),
                |at| driver.mem_free(DEVICE, MemoryKind::Device, at),
                |at| {
                    let stream = StreamHandle::LEGACY;
                    let fill = driver.module_function(module, "fill")?;
                    let shape = LaunchConfig { grid: [1, 1, 1], block: [32, 1, 1], shared_bytes: 0 };
                    let arguments = [KernelArgument::Pointer(at), KernelArgument::U64(1024), KernelArgument::U32(7)];
                    driver.launch_kernel(DEVICE, fill, shape, stream, &arguments)?;
                    driver.memset_d8_async(DEVICE, at, 1, 64, stream)?;
                    driver.memcpy_async(DEVICE, at.offset(64), at, 64, stream)?;
                    driver.memcpy_host_to_device(DEVICE, at, &[2; 8])?;
                    driver.memcpy_device_to_host(DEVICE, &mut [0; 8], at)
                },
            )
        },
    )
}

fn questions(driver: &CudaDriver) -> DriverResult<()> {
    driver.version()?;
    driver.device_count()?;
    driver.memory_info(DEVICE)?;
    driver.can_access_peer(DEVICE, DEVICE).map(|peer| assert!(!peer))
}

/// A pool's life: built, used, trimmed, dropped.
fn pool(driver: &std::sync::Arc<CudaDriver>, kind: MemoryKind) -> Result<(), Error> {
    let pool = Pool::builder().device(Device::new(driver.clone(), DEVICE)?).kind(kind).maximum(16 * MIB).build()?;
    let used = (|| {
        let small = pool.allocate_buffer(300)?;
        let large = pool.allocate_buffer(3 * MIB)?;
        drop((small, large));
        pool.trim(0)
    })();
    pool.check().expect("a failure leaves the pool whole");
    // Once more: the fault struck once, and what it left is given back now.
    let again = pool.allocate_buffer(MIB).and_then(|buffer| {
        drop(buffer);
        pool.trim(0)
    });
    used?;
    again?;
    assert_eq!(pool.statistics().reserved_bytes, 0);
    Ok(())
}

/// What came of a life in which a fault struck.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    Done,
    /// An error with this code.
    Code(i32),
    OutOfMemory,
    Unavailable,
    Other(String),
}

impl From<CuResult> for Outcome {
    fn from(code: CuResult) -> Self {
        Self::Code(code.0)
    }
}

impl From<Error> for Outcome {
    fn from(error: Error) -> Self {
        match error.code() {
            Some(code) if error.is_driver() => Self::Code(code.0),
            _ if error.is_out_of_memory() => Self::OutOfMemory,
            _ if error.is_unavailable() => Self::Unavailable,
            _ => Self::Other(error.to_string()),
        }
    }
}

/// All that a driver is used for.
fn life() -> Result<(), Outcome> {
    let driver = CudaDriver::open(library::full())?;
    questions(&driver)?;
    for kind in [MemoryKind::Device, MemoryKind::Pinned, MemoryKind::Managed] {
        pool(&driver, kind)?;
    }
    streams(&driver)?;
    work(&driver)?;
    Ok(())
}

/// One line of the table: the outcomes that a function's codes have, each with its codes.
fn line(function: &str, outcomes: &BTreeMap<i32, Outcome>) -> String {
    let mut groups: BTreeMap<String, Vec<i32>> = BTreeMap::new();
    for (&code, outcome) in outcomes {
        let name = match outcome {
            Outcome::Done => "nothing is lost".to_owned(),
            Outcome::Code(kept) if *kept == code => "kept".to_owned(),
            Outcome::Code(other) => format!("becomes {other}"),
            Outcome::OutOfMemory => "out of memory".to_owned(),
            Outcome::Unavailable => "unavailable".to_owned(),
            Outcome::Other(text) => text.clone(),
        };
        groups.entry(name).or_default().push(code);
    }
    // The outcome of most codes comes first and names none.
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, codes)| std::cmp::Reverse(codes.len()));
    let mut line = format!("{function}: ");
    for (index, (outcome, codes)) in groups.iter().enumerate() {
        if index == 0 {
            line.push_str(outcome);
        } else {
            _ = write!(line, "; {}: {outcome}", codes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "));
        }
    }
    line
}

/// The contexts that are left after a fault, and are given up here. There is no second try for one call, which has nobody to
/// tell of a failure: the one that gives up a primary context.
fn settle(fake: &Fake) -> (usize, u32) {
    let (depth, references) = (fake.context().1, fake.references(0));
    for _ in 0..depth {
        // SAFETY: cuCtxPopCurrent_v2, of this type; the result may go nowhere.
        let code = unsafe { fake.function::<unsafe extern "C" fn(*mut u64) -> i32>("cuCtxPopCurrent_v2")(std::ptr::null_mut()) };
        assert_eq!(code, 0);
    }
    for _ in 0..references {
        // SAFETY: cuDevicePrimaryCtxRelease_v2, of this type.
        let code = unsafe { fake.function::<unsafe extern "C" fn(i32) -> i32>("cuDevicePrimaryCtxRelease_v2")(0) };
        assert_eq!(code, 0);
    }
    (depth, references)
}

#[test]
fn every_code_of_every_function_has_its_outcome() {
    in_children(&[""], || {
        let fake = Fake::of_child();
        assert!(life().is_ok());
        assert_eq!((fake.outstanding(), fake.context()), (String::new(), (0, 0)));
        let called: BTreeSet<String> = fake.symbols().into_iter().map(|(name, _)| name).filter(|name| fake.calls(name) > 0).collect();
        assert!(called.len() > 50, "only {} functions are called", called.len());
        let mut outcomes: BTreeMap<&str, BTreeMap<i32, Outcome>> = BTreeMap::new();
        let mut strike = |function, code: CuResult| {
            fake.fail(function, 0, code.0);
            let outcome = life().err().unwrap_or(Outcome::Done);
            assert_eq!(fake.clear(), 0, "{function} was not called");
            outcomes.entry(function).or_default().insert(code.0, outcome);
        };
        let codes = CuResult::NAMED.iter().copied().filter(|code| !code.is_success() && !GONE.contains(code));
        for code in codes.chain([UNKNOWN]) {
            for function in &called {
                strike(function, code);
                let left = match function.as_str() {
                    "cuDevicePrimaryCtxRelease_v2" => (0, 1),
                    _ => (0, 0),
                };
                let settled = settle(&fake);
                assert_eq!((settled, fake.outstanding()), (left, String::new()), "after {code} of {function}");
            }
        }
        // What has gone is not given back a second time.
        for code in GONE {
            for function in &called {
                strike(function, code);
                settle(&fake);
            }
        }
        let mut table = String::new();
        for (function, outcomes) in &outcomes {
            _ = writeln!(table, "{}", line(function, outcomes));
        }
        assert!(table == include_str!("outcomes.txt"), "the table is now:\n{table}");
    });
}

/// A failure of a call is of the pool's first, middle and last calls alike.
#[test]
fn a_fault_at_any_moment_leaves_nothing_behind() {
    in_children(&[""], || {
        let fake = Fake::of_child();
        let before = fake.calls("*");
        assert!(life().is_ok());
        let calls = fake.calls("*") - before;
        for k in 0..calls {
            fake.fail("*", k as i64, 719);
            let outcome = life().err().unwrap_or(Outcome::Done);
            assert!(matches!(outcome, Outcome::Done | Outcome::Code(719) | Outcome::Unavailable), "call {k}");
            assert_eq!(fake.clear(), 0, "call {k} was not made");
            let (depth, references) = settle(&fake);
            assert_eq!(fake.outstanding(), "", "after call {k}");
            // The last call gives the context up.
            assert!(depth <= 1 && references == u32::from(k + 1 >= calls), "after call {k} of {calls}");
        }
    });
}

//! Traces replayed on the simulated device, against oracles that know nothing of the reader or the pool.

use flate2::read::GzDecoder;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vrampool::driver::Call;
use vrampool::driver::sim::{SimConfig, SimDriver};
use vrampool::error::CuResult;
use vrampool::trace::{Action, Fit, Passes, Report, Trace, min_capacity, replay};
use vrampool::units::{DeviceId, GIB, MIB};
use vrampool::{Device, Pool, PoolBuilder};

const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/traces")
}

/// The recorded traces.
fn recorded() -> Vec<PathBuf> {
    let entries = fs::read_dir(folder()).expect("the folder is there");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("the folder can be read").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "gz"));
    paths.sort();
    assert!(paths.len() >= 5, "{paths:?}");
    paths
}

fn trace(rows: &str) -> Trace {
    Trace::read("test", format!("{HEADER}{rows}").as_bytes()).expect("the trace is good")
}

fn exactly(passes: u32) -> Passes {
    Passes::Exactly(NonZeroU32::new(passes).expect("not zero"))
}

fn on(driver: &Arc<SimDriver>, trace: &Trace, builder: PoolBuilder, passes: Passes) -> Report {
    let device = Device::new(Arc::clone(driver) as Arc<_>, DeviceId(0)).expect("there is a device");
    let report = replay(trace, &device, builder, passes, &mut |_| {}).expect("the pool can be built");
    driver.audit().expect("nothing is left");
    report
}

/// Counts, live bytes and their peak straight from the text.
#[derive(Default)]
struct Oracle {
    events: usize,
    allocations: usize,
    peak_live: u64,
}

impl Oracle {
    fn of(path: &Path) -> Self {
        let mut text = String::new();
        GzDecoder::new(File::open(path).expect("the file is there")).read_to_string(&mut text).expect("text");
        let mut oracle = Self::default();
        let (mut live, mut sizes) = (0, HashMap::new());
        for line in text.lines().skip(1) {
            let fields: Vec<_> = line.split(',').collect();
            oracle.events += 1;
            match fields[2] {
                "allocate" => {
                    let size: u64 = fields[4].parse().expect("a size");
                    oracle.allocations += 1;
                    live += size;
                    oracle.peak_live = oracle.peak_live.max(live);
                    assert!(sizes.insert(fields[3].to_owned(), size).is_none());
                }
                "free" => live -= sizes.remove(fields[3]).expect("a live block"),
                other => assert_eq!(other, "use"),
            }
        }
        oracle
    }
}

#[test]
fn recorded_traces_are_read_as_an_oracle_reads_them() {
    for path in recorded() {
        let (trace, oracle) = (Trace::open(&path).expect("a trace"), Oracle::of(&path));
        trace.check();
        assert_eq!(trace.events().len(), oracle.events, "{}", path.display());
        assert_eq!(trace.allocations(), oracle.allocations, "{}", path.display());
        assert_eq!(trace.peak_live_bytes(), oracle.peak_live, "{}", path.display());
    }
}

#[test]
fn recorded_traces_take_little_memory_and_little_time() {
    for path in recorded() {
        let trace = Trace::open(&path).expect("a trace");
        let name = path.display();
        let share = |report: &Report| report.driver_time_warm.expect("a warm pass").as_nanos() as f64 / trace.duration_ns() as f64;
        let driver = SimDriver::h200();
        let report = on(&driver, &trace, Pool::builder(), exactly(2));
        assert_eq!((report.passes, report.failed), (2, 0), "{name}");
        assert_eq!(report.peak_reserved_bytes, driver.peak_bytes(DeviceId(0)), "{name}: the meter agrees with the device");
        let ratio = report.peak_reserved_bytes as f64 / trace.peak_live_bytes() as f64;
        // A small trace is a few pages, of which one more is a large part.
        let most = if trace.peak_live_bytes() < GIB { 1.16 } else { 1.10 };
        assert!((1.0..=most).contains(&ratio), "{name}: {ratio}");
        assert!(report.modelled && !report.driver_time_cold.is_zero(), "{name}");
        assert!(share(&report) <= 0.02, "{name}: {}", share(&report));
        let report = on(&SimDriver::h200(), &trace, Pool::builder(), exactly(5));
        assert!(report.failed == 0 && share(&report) <= 0.005, "{name}: {}", share(&report));
    }
}

#[test]
fn recorded_traces_complete_with_little_more_than_what_is_live() {
    for (name, most) in [
        ("gnn_train", 1.025),
        ("gpt2_train", 1.025),
        ("resnet50_train_eval", 1.025),
        ("prefetch_streams", 1.045),
        ("llm_serve_small", 1.045),
        ("small_model", 1.16),
    ] {
        let trace = Trace::open(folder().join(format!("{name}.csv.gz"))).expect("a trace");
        let mut most_tried = 0;
        let fit = min_capacity(&trace, &Device::simulated(), Pool::builder(), &mut |trial| {
            assert!(trial.events <= trace.events().len() && trial.number >= most_tried);
            most_tried = trial.number;
        });
        let Ok(Fit::Smallest(capacity)) = fit else { panic!("{name}: {fit:?}") };
        let ratio = capacity.bytes as f64 / trace.peak_live_bytes() as f64;
        assert!((1.0..=most).contains(&ratio), "{name}: {ratio}");
        let share = capacity.driver_time.as_nanos() as f64 / trace.duration_ns() as f64;
        assert!(capacity.modelled && 0.0 < share && share <= 0.10, "{name}: {share}");
        assert_eq!(capacity.trials, most_tried, "{name}");
        assert!(capacity.first_failure_above.is_none_or(|bytes| bytes as f64 > 1.05 * capacity.bytes as f64), "{name}");
        for eighth in 0..=8 {
            let maximum = capacity.bytes + capacity.bytes * eighth / 160;
            let report = on(&SimDriver::h200(), &trace, Pool::builder().maximum(maximum), exactly(1));
            assert!(report.failed == 0 && report.peak_reserved_bytes <= maximum, "{name}: {maximum}");
            if eighth == 0 {
                assert_eq!(report.driver_calls_cold, capacity.driver_calls, "{name}");
            }
        }
        let less = capacity.bytes - 2 * MIB;
        let report = on(&SimDriver::h200(), &trace, Pool::builder().maximum(less), exactly(1));
        let larger = (1..=8).map(|eighth| less + less * eighth / 160);
        let fails = |maximum| on(&SimDriver::h200(), &trace, Pool::builder().maximum(maximum), exactly(1)).failed > 0;
        assert!(report.failed > 0 || larger.into_iter().any(fails), "{name}: a page less does not do");
    }
}

#[test]
fn the_smallest_capacity_has_the_pools_options_but_for_its_maximum() {
    let trace = trace("1,0,allocate,1,4194304,0\n1,1,allocate failure,(nil),8388608,0\n1,2,free,1,0,0\n1,3,allocate,1,6291456,0\n");
    let bytes = |builder| match min_capacity(&trace, &Device::simulated(), builder, &mut |_| {}) {
        Ok(Fit::Smallest(capacity)) => capacity.bytes,
        other => panic!("{other:?}"),
    };
    assert_eq!(bytes(Pool::builder()), 6 * MIB, "what failed when it was recorded may fail");
    assert_eq!(bytes(Pool::builder().maximum(2 * MIB)), 6 * MIB);
    assert_eq!(bytes(Pool::builder().initial(10 * MIB)), 10 * MIB);
    assert_eq!(bytes(Pool::builder().no_vmm(true)), 6 * MIB, "4 MiB go back before 6 MiB are taken");
}

#[test]
fn a_trace_that_the_device_cannot_hold_has_no_capacity() {
    let trace = trace("1,0,allocate,1,4194304,0\n1,1,allocate,2,12582912,0\n1,2,allocate,3,12582912,0\n");
    let driver = SimDriver::new(SimConfig::default().capacity(8 * MIB));
    let device = Device::new(Arc::clone(&driver) as Arc<_>, DeviceId(0)).expect("there is a device");
    match min_capacity(&trace, &device, Pool::builder(), &mut |_| {}) {
        Ok(Fit::Nowhere(failure)) => assert_eq!((failure.index, failure.error.is_out_of_memory()), (1, true), "the first"),
        other => panic!("{other:?}"),
    }
    driver.audit().expect("nothing is left");
}

#[test]
fn a_driver_that_fails_ends_the_search() {
    let trace = trace("1,0,allocate,1,4194304,0\n");
    let driver = SimDriver::h200();
    let device = Device::new(Arc::clone(&driver) as Arc<_>, DeviceId(0)).expect("there is a device");
    let error = min_capacity(&trace, &device, Pool::builder(), &mut |trial| {
        if trial.number == 2 {
            driver.fail(Call::MemCreate, 1, CuResult::ERROR_UNKNOWN);
        }
    });
    assert!(error.as_ref().is_err_and(|error| error.is_driver()), "{error:?}");
    driver.audit().expect("nothing is left");
}

#[test]
fn recorded_traces_complete_twice_near_their_limit() {
    for path in recorded() {
        let trace = Trace::open(&path).expect("a trace");
        for percent in [103, 105, 110] {
            if trace.peak_live_bytes() < GIB {
                continue;
            }
            let capacity = trace.peak_live_bytes() * percent / 100;
            let report = on(&SimDriver::h200(), &trace, Pool::builder().maximum(capacity), exactly(2));
            assert_eq!((report.passes, report.failed), (2, 0), "{}: {percent} %", path.display());
        }
    }
}

#[test]
fn with_a_loose_slack_recorded_traces_settle() {
    for path in recorded() {
        let trace = Trace::open(&path).expect("a trace");
        let report = on(&SimDriver::h200(), &trace, Pool::builder().slack(0.4), exactly(6));
        let warm = report.driver_calls_warm.expect("a warm pass");
        assert_eq!((report.passes, report.failed, warm.memory_calls()), (6, 0, 0), "{}: {warm:?}", path.display());
    }
}

#[test]
fn passes_are_made_as_asked_for_on_one_pool() {
    let trace = trace("1,0,allocate,1,3000000,0\n1,1,allocate,2,100,0\n1,2,free,1,0,0\n");
    for passes in [1, 2, 5] {
        let driver = SimDriver::h200();
        let report = on(&driver, &trace, Pool::builder(), exactly(passes));
        assert_eq!(report.passes, passes);
        // What the first pass leaves live is free in the next.
        assert_eq!(driver.calls(Call::MemCreate), report.driver_calls_cold.get(Call::MemCreate));
        assert_eq!(report.driver_calls_warm.map(|calls| calls.total()), (passes > 1).then_some(0));
        assert_eq!(report.warm_ns_per_event.is_some(), passes > 1);
        assert_eq!(report.driver_time_warm.is_some(), passes > 1);
    }
    let report = on(&SimDriver::h200(), &trace, Pool::builder(), Passes::Steady);
    assert!(report.passes > 2, "a short trace is repeated");
}

#[test]
fn the_first_request_that_fails_is_named_and_the_rest_goes_on() {
    let trace = trace(
        "7,0,allocate,1,4194304,0\n7,1,allocate,2,8388608,0\n7,2,use,2,8388608,3\n7,3,free,2,8388608,0\n\
         7,4,allocate,3,18446744073709551615,0\n7,5,allocate,2,4194304,0\n7,6,free,1,0,0\n",
    );
    let driver = SimDriver::h200();
    let report = on(&driver, &trace, Pool::builder().maximum(8 * MIB), exactly(3));
    assert_eq!(report.failed, 2, "in each pass");
    let first = report.first_failure.expect("a failure");
    assert_eq!((first.index, first.event.line(), first.event.size(), first.pass), (1, 3, 8 * MIB, 1));
    assert_eq!(first.event.action(), Action::Allocate);
    assert!(first.error.is_out_of_memory());
    assert_eq!(report.peak_reserved_bytes, 8 * MIB);
    assert_eq!(on(&SimDriver::h200(), &trace, Pool::builder().maximum(8 * MIB), Passes::Steady).passes, 2, "no figure to make steady");
}

#[test]
fn a_pool_that_cannot_be_built_is_an_error() {
    let trace = trace("1,0,allocate,1,1,0\n");
    let error = replay(&trace, &Device::simulated(), Pool::builder().maximum(MIB), exactly(1), &mut |_| {}).expect_err("less than a page");
    assert!(error.is_invalid_argument());
}

#[test]
fn failures_of_the_recording_are_tried_again() {
    let trace = trace("1,0,allocate,1,4194304,0\n1,1,allocate failure,(nil),8388608,0\n1,2,free,1,0,0\n1,3,allocate,1,8388608,0\n");
    for (maximum, repeated) in [(8 * MIB, 1), (64 * MIB, 0)] {
        let report = on(&SimDriver::h200(), &trace, Pool::builder().maximum(maximum), exactly(2));
        assert_eq!((report.failed, report.recorded_failures_repeated), (0, repeated), "{maximum}");
    }
}

#[test]
fn a_driver_that_fails_is_no_lack_of_memory() {
    let trace = trace("1,0,allocate,1,4194304,0\n1,1,allocate failure,(nil),8388608,0\n1,2,free,1,0,0\n");
    let driver = SimDriver::h200();
    driver.fail(Call::MemCreate, 1, CuResult::ERROR_UNKNOWN);
    let report = on(&driver, &trace, Pool::builder(), exactly(1));
    let first = report.first_failure.expect("a failure");
    assert_eq!((report.failed, first.index), (1, 0));
    assert!(first.error.is_driver() && first.error.code() == Some(CuResult::ERROR_UNKNOWN));
}

#[test]
fn a_small_device_holds_what_fits() {
    let trace = Trace::open(folder().join("small_model.csv.gz")).expect("a trace");
    assert!((44 * MIB..48 * MIB).contains(&trace.peak_live_bytes()));
    let driver = SimDriver::new(SimConfig::default().capacity(64 * MIB));
    let report = on(&driver, &trace, Pool::builder(), exactly(2));
    assert_eq!(report.failed, 0);
    assert!((report.peak_reserved_bytes as f64) < 1.6 * trace.peak_live_bytes() as f64);
    let small = SimDriver::new(SimConfig::default().capacity(32 * MIB));
    let report = on(&small, &trace, Pool::builder(), exactly(2));
    assert!(report.failed > 0 && report.first_failure.is_some_and(|first| first.error.is_out_of_memory()));
    assert!(report.peak_reserved_bytes <= 32 * MIB);
}

#[test]
fn progress_counts_up_in_every_pass() {
    let trace = Trace::open(folder().join("llm_serve_small.csv.gz")).expect("a trace");
    let mut seen = Vec::new();
    replay(&trace, &Device::simulated(), Pool::builder(), exactly(2), &mut |progress| seen.push((progress.pass, progress.events)))
        .expect("the pool can be built");
    assert!(seen.is_sorted());
    for pass in [1, 2] {
        assert!(seen.contains(&(pass, 0)) && seen.contains(&(pass, trace.events().len())));
    }
}

#[test]
fn hand_written_logs() {
    let rmm = Trace::open(folder().join("rmm.csv")).expect("a trace");
    rmm.check();
    assert_eq!((rmm.events().len(), rmm.allocations(), rmm.recorded_failures()), (14, 9, 1));
    assert_eq!((rmm.threads(), rmm.streams()), (&[24_120, 24_131][..], &[0, 0x55d0_c8a3_b2f0][..]));
    assert_eq!(rmm.duration_ns(), 791_000, "over midnight");
    let quoted = Trace::open(folder().join("quoted_crlf.csv")).expect("a trace");
    quoted.check();
    assert_eq!(
        quoted.events().iter().map(|event| (event.action(), event.line())).collect::<Vec<_>>(),
        [(Action::Allocate, 2), (Action::Use, 4), (Action::Free, 5)]
    );
    let cut = Trace::open(folder().join("cut.csv")).expect_err("its last line is cut").to_string();
    assert!(cut.ends_with("cut.csv: line 4: 4 fields, where the first line names 6 columns"), "{cut}");
}

//! `vrampool replay`: a trace in, a table or JSON out.

use crate::args::ReplayArguments;
use crate::device::{Selected, select};
use crate::{Failure, format, output, table};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use vrampool::driver::sim::{SimConfig, SimDriver};
use vrampool::driver::{CallCounts, Driver, MemoryKind, Meter};
use vrampool::trace::{self, Action, Passes, Report, Trace, Verification, replay, replay_verified};
use vrampool::units::{Bytes, DeviceId, MIB};
use vrampool::{Device, Pool};

/// What is live may take one part in so many of the host's memory, where that stands behind the simulated device.
const HOST_SHARE: u64 = 4;

/// A trace and what its replay took.
pub(crate) struct Replayed {
    pub(crate) trace: Trace,
    pub(crate) report: Report,
}

impl Replayed {
    pub(crate) fn reserved_over_live(&self) -> Option<f64> {
        let live = self.trace.peak_live_bytes();
        (live > 0).then(|| self.report.peak_reserved_bytes as f64 / live as f64)
    }
}

pub(crate) fn run(arguments: &ReplayArguments) -> Result<ExitCode, Failure> {
    // A file that cannot be read is found before anything is replayed.
    let traces = read(&arguments.traces)?;
    let mut selected = select(arguments.common.device)?;
    if arguments.verify && selected.is_simulated() {
        selected.device = backed(&traces)?;
    }
    // An option of the command line wins over its like in the environment.
    let configured = Pool::builder().configure_from_env()?;
    let passes = arguments.repeat.map_or(Passes::Steady, Passes::Exactly);
    let mut all = Vec::with_capacity(traces.len());
    for trace in traces {
        let mut builder = configured.clone();
        if let Some(capacity) = arguments.capacity {
            builder = builder.maximum(capacity);
        }
        let bar = progress_bar(&trace);
        let replay = if arguments.verify { replay_verified } else { replay };
        let report = replay(&trace, &selected.device, builder, passes, &mut |progress| {
            bar.set_message(format!("pass {}", progress.pass));
            bar.set_position(progress.events as u64);
        })?;
        bar.finish_and_clear();
        all.push(Replayed { trace, report });
    }
    if arguments.common.json {
        output::print_traces(all.iter().map(|replayed| to_json(replayed, &selected)).collect())?;
    } else {
        output::print(&table::replayed(&all, &selected)?)?;
    }
    let mut status = ExitCode::SUCCESS;
    for replayed in &all {
        for message in failure(replayed).into_iter().chain(mismatch(replayed)) {
            output::complain(&message);
            status = ExitCode::from(1);
        }
    }
    Ok(status)
}

/// A simulated device with memory behind its addresses, and room for any one of the traces.
fn backed(traces: &[Trace]) -> Result<Device, Failure> {
    let system = rustix::system::sysinfo();
    let host_bytes = (system.totalram as u64).saturating_mul(u64::from(system.mem_unit));
    let Some(largest) = traces.iter().max_by_key(|trace| trace.peak_live_bytes()) else { return Ok(Device::simulated()) };
    let live = largest.peak_live_bytes();
    if live > host_bytes / HOST_SHARE {
        return Err(Failure::Usage(format!(
            "{}: --verify on the simulated device keeps every byte in this machine's memory: {} live is more than a quarter of {}; \
             verify on a GPU",
            largest.name(),
            Bytes(live),
            Bytes(host_bytes)
        )));
    }
    // Pages that are never touched take nothing of the host.
    let capacity = (2 * live).next_multiple_of(2 * MIB) + 256 * MIB;
    Ok(Device::new(SimDriver::new(SimConfig::default().capacity(capacity).backed(true)), DeviceId(0))?)
}

pub(crate) fn read(paths: &[PathBuf]) -> Result<Vec<Trace>, Failure> {
    let is_stdin = |path: &Path| path.as_os_str() == "-";
    if paths.iter().filter(|path| is_stdin(path)).count() > 1 {
        return Err(Failure::Usage("standard input (-) can be read once only".to_owned()));
    }
    let read = |path: &PathBuf| {
        if is_stdin(path) {
            return Trace::read("-", std::io::stdin().lock());
        }
        Trace::open(path)
    };
    paths.iter().map(|path| read(path).map_err(Failure::from)).collect()
}

/// A bar on standard error, where that is a terminal.
pub(crate) fn progress_bar(trace: &Trace) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} {bar:30} {human_pos}/{human_len} events, {msg}");
    let bar = ProgressBar::new(trace.events().len() as u64).with_prefix(short_name(trace.name()));
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// A path's last part, without what says how the file is written.
pub(crate) fn short_name(name: &str) -> String {
    let file = Path::new(name).file_name().map_or_else(|| name.into(), |file| file.to_string_lossy());
    let file = file.strip_suffix(".gz").unwrap_or(&file);
    file.strip_suffix(".csv").unwrap_or(file).to_owned()
}

/// Names an event that failed.
pub(crate) fn name_failure(trace: &Trace, failure: &trace::Failure) -> String {
    let event = &failure.event;
    format!(
        "{}: event {} (line {}, thread {}, pass {}): {} of {} bytes failed: {}",
        trace.name(),
        failure.index,
        event.line(),
        trace.threads()[event.thread()],
        failure.pass,
        event.action(),
        event.size(),
        failure.error
    )
}

pub(crate) fn failure_to_json(failure: &trace::Failure) -> Value {
    json!({
        "event": failure.index,
        "line": failure.event.line(),
        "size": failure.event.size(),
        "error": failure.error.to_string(),
    })
}

/// Calls by the names of their functions.
pub(crate) fn calls_to_json(counts: &CallCounts) -> Value {
    counts.iter().map(|(name, count)| (name.to_owned(), count.into())).collect::<Map<_, _>>().into()
}

pub(crate) fn milliseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e6
}

/// To a tenth.
pub(crate) fn tenths(ns: f64) -> f64 {
    (ns * 10.0).round() / 10.0
}

/// What to say where requests failed.
fn failure(replayed: &Replayed) -> Option<String> {
    let first = replayed.report.first_failure.as_ref()?;
    let mut message = name_failure(&replayed.trace, first);
    match replayed.report.failed {
        0 | 1 => {}
        failed => message += &format!(" ({} requests failed in all)", format::count(failed)),
    }
    Some(message)
}

/// What to say where a block was not as it had been filled.
fn mismatch(replayed: &Replayed) -> Option<String> {
    let Replayed { trace, report } = replayed;
    let verification = report.verification.as_ref()?;
    let first = verification.first.as_ref()?;
    let line = |index: usize| trace.events().get(index).map_or(0, |event| event.line());
    let found = match first.index {
        Some(index) => format!("event {index} (line {}, pass {})", line(index), first.pass),
        None => format!("end of pass {}", first.pass),
    };
    let mut message = format!(
        "{}: {found}: {} of the 32-bit words of the block of {} bytes at {}, allocated by event {} (line {}), are not as they were \
         filled",
        trace.name(),
        format::count(first.words),
        first.size,
        first.address,
        first.allocated,
        line(first.allocated)
    );
    if verification.mismatches > 1 {
        message += &format!(" ({} blocks in all)", format::count(verification.mismatches));
    }
    Some(message)
}

fn verification_to_json(verification: &Verification) -> [(&'static str, Value); 4] {
    let first = verification.first.as_ref().map(|first| {
        json!({
            "event": first.index,
            "allocated": first.allocated,
            "pass": first.pass,
            "address": first.address.to_string(),
            "size": first.size,
            "words": first.words,
        })
    });
    [
        ("verified_blocks", verification.blocks.into()),
        ("verified_bytes", verification.bytes.into()),
        ("mismatches", verification.mismatches.into()),
        ("first_mismatch", first.into()),
    ]
}

fn to_json(replayed: &Replayed, selected: &Selected) -> Value {
    let Replayed { trace, report } = replayed;
    let mut value = json!({
        "trace": trace.name(),
        "device": selected.name,
        "events": trace.events().len(),
        "allocations": trace.allocations(),
        "peak_live_bytes": trace.peak_live_bytes(),
        "peak_reserved_bytes": report.peak_reserved_bytes,
        "reserved_over_live": replayed.reserved_over_live(),
        "cold_ns_per_event": tenths(report.cold_ns_per_event),
        "warm_ns_per_event": report.warm_ns_per_event.map(tenths),
        "driver_calls_cold": calls_to_json(&report.driver_calls_cold),
        "driver_calls_warm": report.driver_calls_warm.as_ref().map(calls_to_json),
        "driver_ms_cold": milliseconds(report.driver_time_cold),
        "driver_ms_warm": report.driver_time_warm.map(milliseconds),
        "failed": report.failed,
        "first_failure": report.first_failure.as_ref().map(failure_to_json),
        "recorded_failures": trace.recorded_failures(),
        "recorded_failures_repeated": report.recorded_failures_repeated,
        "passes": report.passes,
        "modelled": report.modelled,
    });
    if let (Some(fields), Some(verification)) = (value.as_object_mut(), &report.verification) {
        fields.extend(verification_to_json(verification).map(|(name, value)| (name.to_owned(), value)));
    }
    value
}

/// What a trace costs without a pool.
pub(crate) struct Direct {
    pub(crate) calls: CallCounts,
    /// By the simulated device's model; `None` where the device could not hold it all.
    pub(crate) time: Option<Duration>,
}

/// Has every allocation and free of a trace call `cuMemAlloc` and `cuMemFree` of a simulated device.
pub(crate) fn without_a_pool(trace: &Trace) -> Direct {
    let driver = Meter::new(SimDriver::h200());
    let mut blocks = vec![None; trace.blocks()];
    let mut complete = true;
    for event in trace.events() {
        // The driver has no blocks without bytes.
        let Some(block) = event.block().filter(|_| event.size() > 0) else { continue };
        match event.action() {
            Action::Allocate => {
                blocks[block] = driver.mem_alloc(DeviceId(0), MemoryKind::Device, event.size()).ok();
                complete &= blocks[block].is_some();
            }
            Action::Free => {
                if let Some(address) = blocks[block].take() {
                    complete &= driver.mem_free(DeviceId(0), MemoryKind::Device, address).is_ok();
                }
            }
            Action::Use | Action::AllocateFailure => {}
        }
    }
    Direct { calls: driver.counts(), time: driver.modelled_ns().filter(|_| complete).map(Duration::from_nanos) }
}

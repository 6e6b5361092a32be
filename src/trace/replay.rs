//! Feeds a trace to a pool, and says what it took.
//!
//! Events go to the pool one by one, and nothing of the trace is known to the pool before its turn comes. One thread
//! replays the events of all of them, in the order of the trace. Streams are not replayed yet: a free makes the block
//! reusable at once, and a `use` does nothing.

use super::event::{Action, Event, Trace};
use super::verify::{Verification, Verifier};
use crate::driver::{CallCounts, Device, Driver, Meter};
use crate::error::{Error, Result};
use crate::pool::{Pool, PoolBuilder};
use crate::sync::Arc;
use crate::units::DevicePtr;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

/// Warm passes are repeated until they took this long together, or there were this many of them.
const STEADY_TIME: Duration = Duration::from_millis(200);
const STEADY_PASSES: u32 = 20;
/// How many events pass between two reports of progress.
const PROGRESS_EVENTS: usize = 1 << 16;

/// How many times a trace is replayed on one pool. The first pass is cold: the pool begins empty. The others are warm.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Passes {
    /// One cold pass, and warm ones until their time is steady: at least one, and more of a short trace.
    #[default]
    Steady,
    /// Exactly so many.
    Exactly(NonZeroU32),
}

/// How far a replay is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Progress {
    /// The pass, counted from one.
    pub pass: u32,
    /// The events done in this pass.
    pub events: usize,
}

/// What a replay took.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The passes made.
    pub passes: u32,
    /// Physical bytes held from the driver at the worst moment of the cold pass and the first warm one, by the count of
    /// the driver layer ([`Meter`]).
    pub peak_reserved_bytes: u64,
    /// The pool's own time per event in the cold pass, in nanoseconds: the time of the pass without the time inside
    /// driver calls.
    pub cold_ns_per_event: f64,
    /// The same of the fastest warm pass; `None` where there was none.
    pub warm_ns_per_event: Option<f64>,
    /// The driver calls of the cold pass, building the pool among them.
    pub driver_calls_cold: CallCounts,
    /// The driver calls of the last pass, where that is a warm one.
    pub driver_calls_warm: Option<CallCounts>,
    /// The time of the cold pass's driver calls: measured, or what the device's model says where it has one
    /// ([`Driver::modelled_ns`]).
    pub driver_time_cold: Duration,
    /// The same of the last pass, where that is a warm one.
    pub driver_time_warm: Option<Duration>,
    /// Whether the driver's times are a model's.
    pub modelled: bool,
    /// How many requests failed, in the pass where most did. Allocations that failed in the recording too are not among
    /// them.
    pub failed: u64,
    /// The first request that failed.
    pub first_failure: Option<Failure>,
    /// How many of the allocations that [failed in the recording](Trace::recorded_failures) failed in the first pass.
    pub recorded_failures_repeated: u64,
    /// What came of verification, where there was any ([`replay_verified()`]).
    pub verification: Option<Verification>,
}

/// A request that failed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The event's index in [`Trace::events`], from zero.
    pub index: usize,
    /// The event.
    pub event: Event,
    /// The pass, counted from one.
    pub pass: u32,
    /// What the pool said.
    pub error: Error,
}

/// Replays a trace on a pool of its own, which `builder` describes but for the device.
///
/// An allocation that fails is counted, and its block's frees are passed over; the rest of the trace goes on. An
/// allocation that failed in the recording is tried, and given back where it now succeeds. What the trace leaves live is
/// freed at the end of each pass; that counts among the pass's driver calls, and not in its time per event.
///
/// `progress` is called now and then, outside of what is timed.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// use vrampool::trace::{Passes, Trace, replay};
/// use vrampool::{Device, Pool};
///
/// let log = "Thread,Time,Action,Pointer,Size,Stream\n1,0.5,allocate,0x7f0000000000,3145728,0\n";
/// let trace = Trace::read("example", log.as_bytes())?;
/// let report = replay(&trace, &Device::simulated(), Pool::builder(), Passes::Steady, &mut |_| {})?;
/// assert_eq!(report.failed, 0);
/// assert_eq!(report.peak_reserved_bytes, 4 << 20, "two pages of 2 MiB");
/// # }
/// # Ok::<(), vrampool::Error>(())
/// ```
///
/// # Errors
/// Those of [`PoolBuilder::build`]. A request that fails is no error here; it is in the report.
pub fn replay(trace: &Trace, device: &Device, builder: PoolBuilder, passes: Passes, progress: &mut dyn FnMut(Progress)) -> Result<Report> {
    run(trace, device, builder, passes, None, OnFailure::GoOn, progress)
}

/// As [`replay()`], and has the device fill every block right after it is allocated, and check every word of it before it
/// is freed, or at the end of the pass where it is left live. Each word depends on the block and on the word's place.
///
/// A mismatch stops nothing; it is in the report's [`verification`](Report::verification). The figures are the pool's own,
/// as without verification: its calls, their time and its memory are not among them. (They leave the caches of the processor
/// colder, though.) A request of which the filling or the check fails counts as failed.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// use vrampool::driver::sim::{SimConfig, SimDriver};
/// use vrampool::trace::{Passes, Trace, replay_verified};
/// use vrampool::units::{DeviceId, MIB};
/// use vrampool::{Device, Pool};
///
/// let log = "Thread,Time,Action,Pointer,Size,Stream\n1,0.5,allocate,0x7f0000000000,3145727,0\n";
/// let trace = Trace::read("example", log.as_bytes())?;
/// let driver = SimDriver::new(SimConfig::default().capacity(64 * MIB).backed(true));
/// let device = Device::new(driver, DeviceId(0))?;
/// let report = replay_verified(&trace, &device, Pool::builder(), Passes::Steady, &mut |_| {})?;
/// assert_eq!(report.verification.map(|verification| verification.mismatches), Some(0));
/// # }
/// # Ok::<(), vrampool::Error>(())
/// ```
///
/// # Errors
/// Those of [`PoolBuilder::build`]; [`Error::is_driver`] where the kernels cannot be loaded and run;
/// [`Error::is_unavailable`] on a simulated device that has no memory behind its addresses.
pub fn replay_verified(
    trace: &Trace,
    device: &Device,
    builder: PoolBuilder,
    passes: Passes,
    progress: &mut dyn FnMut(Progress),
) -> Result<Report> {
    run(trace, device, builder, passes, Some(Verifier::new(device, trace.blocks())?), OnFailure::GoOn, progress)
}

/// One cold pass that ends with the first request that fails, as [`replay()`] makes it otherwise.
pub(super) fn attempt(trace: &Trace, device: &Device, builder: PoolBuilder, progress: &mut dyn FnMut(Progress)) -> Result<Report> {
    run(trace, device, builder, Passes::Exactly(NonZeroU32::MIN), None, OnFailure::End, progress)
}

/// What a pass does after a request that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OnFailure {
    GoOn,
    End,
}

fn run(
    trace: &Trace,
    device: &Device,
    builder: PoolBuilder,
    passes: Passes,
    verifier: Option<Verifier>,
    on_failure: OnFailure,
    progress: &mut dyn FnMut(Progress),
) -> Result<Report> {
    let meter = Arc::new(Meter::new(Arc::clone(device.driver())));
    let mut mark = Mark::of(&meter, verifier.as_ref());
    let pool = builder.device(Device::new(meter.clone(), device.id())?).build()?;
    let mut player =
        Player { trace, pool: &pool, meter: &meter, blocks: vec![DevicePtr::NULL; trace.blocks()], verifier, on_failure, progress };
    let cold = player.pass(1, &mut mark)?;

    let mut report = Report {
        passes: 1,
        peak_reserved_bytes: meter.peak_reserved_bytes(),
        cold_ns_per_event: cold.ns_per_event(trace),
        warm_ns_per_event: None,
        driver_calls_cold: cold.calls,
        driver_calls_warm: None,
        driver_time_cold: cold.driver_time,
        driver_time_warm: None,
        modelled: meter.modelled_ns().is_some(),
        failed: cold.failed,
        first_failure: cold.first_failure,
        recorded_failures_repeated: cold.recorded_failures_repeated,
        verification: None,
    };
    let mut warm_time = Duration::ZERO;
    loop {
        let more = match passes {
            Passes::Exactly(count) => report.passes < count.get(),
            // Where requests fail the time says little.
            Passes::Steady if report.failed > 0 => report.passes < 2,
            Passes::Steady => report.passes < 2 || (warm_time < STEADY_TIME && report.passes <= STEADY_PASSES),
        };
        if !more {
            report.verification = player.verifier.take().map(|verifier| verifier.result.clone());
            return Ok(report);
        }
        report.passes += 1;
        let warm = player.pass(report.passes, &mut mark)?;
        if report.passes == 2 {
            report.peak_reserved_bytes = meter.peak_reserved_bytes();
        }
        warm_time += warm.own_time;
        let ns = warm.ns_per_event(trace);
        report.warm_ns_per_event = Some(report.warm_ns_per_event.map_or(ns, |fastest| fastest.min(ns)));
        report.driver_calls_warm = Some(warm.calls);
        report.driver_time_warm = Some(warm.driver_time);
        report.failed = report.failed.max(warm.failed);
        report.first_failure = report.first_failure.or(warm.first_failure);
    }
}

/// The meter at one moment.
struct Mark {
    calls: CallCounts,
    driver_ns: u64,
}

impl Mark {
    fn of(meter: &Meter, verifier: Option<&Verifier>) -> Self {
        // The meter's own time has nothing of the verifier's; the model, which lies below, has.
        let modelled = meter.modelled_ns().map(|ns| ns.saturating_sub(verifier.map_or(0, |verifier| verifier.modelled_ns)));
        Self { calls: meter.counts(), driver_ns: modelled.unwrap_or_else(|| meter.wall_ns()) }
    }
}

/// One pass's result.
struct Pass {
    own_time: Duration,
    calls: CallCounts,
    driver_time: Duration,
    failed: u64,
    first_failure: Option<Failure>,
    recorded_failures_repeated: u64,
}

impl Pass {
    fn ns_per_event(&self, trace: &Trace) -> f64 {
        self.own_time.as_nanos() as f64 / trace.events().len().max(1) as f64
    }
}

struct Player<'a> {
    trace: &'a Trace,
    pool: &'a Pool,
    meter: &'a Meter,
    /// The addresses of the live blocks by number; [`DevicePtr::NULL`] where none is live or the block has no bytes, and
    /// [`LOST`] where its allocation failed.
    blocks: Vec<DevicePtr>,
    verifier: Option<Verifier>,
    on_failure: OnFailure,
    progress: &'a mut dyn FnMut(Progress),
}

/// Stands for a block that could not be had. No block begins at the last byte.
const LOST: DevicePtr = DevicePtr::new(u64::MAX);

impl Player<'_> {
    /// Replays the trace once, and frees what it leaves. Counts and driver times are those since `mark`, which moves to
    /// the end of the pass.
    fn pass(&mut self, number: u32, mark: &mut Mark) -> Result<Pass> {
        let mut pass = Pass {
            own_time: Duration::ZERO,
            calls: CallCounts::default(),
            driver_time: Duration::ZERO,
            failed: 0,
            first_failure: None,
            recorded_failures_repeated: 0,
        };
        for (chunk, events) in self.trace.events().chunks(PROGRESS_EVENTS).enumerate() {
            (self.progress)(Progress { pass: number, events: chunk * PROGRESS_EVENTS });
            let inside = self.elsewhere();
            let start = Instant::now();
            for (index, event) in events.iter().enumerate() {
                let index = chunk * PROGRESS_EVENTS + index;
                if let Err(error) = self.event(event, index, number, &mut pass) {
                    pass.failed += 1;
                    pass.first_failure.get_or_insert(Failure { index, event: *event, pass: number, error });
                    if self.on_failure == OnFailure::End {
                        break;
                    }
                }
            }
            let elapsed = start.elapsed();
            pass.own_time += elapsed.saturating_sub(self.elsewhere().saturating_sub(inside));
            if pass.failed > 0 && self.on_failure == OnFailure::End {
                break;
            }
        }
        (self.progress)(Progress { pass: number, events: self.trace.events().len() });
        for block in 0..self.blocks.len() {
            self.free(block, None, number)?;
        }
        let end = Mark::of(self.meter, self.verifier.as_ref());
        pass.calls = end.calls.since(&mark.calls);
        pass.driver_time = Duration::from_nanos(end.driver_ns.saturating_sub(mark.driver_ns));
        *mark = end;
        Ok(pass)
    }

    /// The time that was spent in driver calls and on verification.
    fn elsewhere(&self) -> Duration {
        let verifying = self.verifier.as_ref().map_or(Duration::ZERO, |verifier| verifier.wall);
        Duration::from_nanos(self.meter.wall_ns()) + verifying
    }

    #[inline]
    fn event(&mut self, event: &Event, index: usize, number: u32, pass: &mut Pass) -> Result<()> {
        match (event.action(), event.block()) {
            (Action::Allocate, Some(block)) => match self.pool.allocate(event.size()) {
                Ok(address) => {
                    self.blocks[block] = address;
                    if let Some(verifier) = &mut self.verifier {
                        verifier.fill(block, address, event.size(), index, number)?;
                    }
                }
                Err(error) => {
                    self.blocks[block] = LOST;
                    return Err(error);
                }
            },
            (Action::Free, Some(block)) => self.free(block, Some(index), number)?,
            (Action::Free, None) => self.pool.free(DevicePtr::NULL)?,
            (Action::AllocateFailure, _) => match self.pool.allocate(event.size()) {
                Ok(address) => {
                    let verified = match &mut self.verifier {
                        Some(verifier) => verifier.fill_and_check(address, event.size(), index, number),
                        None => Ok(()),
                    };
                    self.pool.free(address)?;
                    verified?;
                }
                Err(error) if error.is_out_of_memory() || error.is_invalid_argument() => pass.recorded_failures_repeated += 1,
                Err(error) => return Err(error),
            },
            (Action::Use, _) | (Action::Allocate, None) => {}
        }
        Ok(())
    }

    /// Frees a block, before event `index` or at the end of the pass, and checks it first.
    #[inline]
    fn free(&mut self, block: usize, index: Option<usize>, number: u32) -> Result<()> {
        let address = std::mem::take(&mut self.blocks[block]);
        let verified = match &mut self.verifier {
            Some(verifier) => verifier.check(block, index, number),
            None => Ok(()),
        };
        if address != LOST {
            self.pool.free(address)?;
        }
        verified
    }
}

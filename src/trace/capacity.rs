//! The smallest capacity at which a trace completes.
//!
//! A trial is one cold pass of the whole trace on a fresh pool that may hold so many pages; it ends with the first request
//! that fails. A pool that completes with some number of pages may fail with more, since it then places blocks elsewhere: what
//! is looked for is a capacity below which the trace fails and a little above which it still completes.

use super::event::Trace;
use super::replay::{Failure, Report, attempt};
use crate::driver::{CallCounts, Device, MemoryKind};
use crate::error::Result;
use crate::pool::PoolBuilder;
use std::collections::BTreeMap;
use std::time::Duration;

/// So many larger capacities are tried, spread evenly over one part in twenty of the capacity.
const PROBES: u64 = 8;
const PROBED_SHARE: u64 = 20;
/// Further capacities that are tried in the end, in hundredths of the capacity.
const BEYOND: [u64; 4] = [110, 125, 150, 200];

/// What the search for the smallest capacity came to.
#[derive(Clone, Debug)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant, reason = "one is made after many passes over a trace")]
pub enum Fit {
    /// The trace completes.
    Smallest(Capacity),
    /// It does not complete even with the whole device: the first request that fails there.
    Nowhere(Failure),
}

/// The smallest capacity, and the pass at it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Capacity {
    /// The most physical bytes that the pool may hold: whole pages.
    pub bytes: u64,
    /// The smallest larger capacity that was tried and at which the trace fails. It is more than 1.05 times [`Self::bytes`].
    pub first_failure_above: Option<u64>,
    /// How many capacities were tried.
    pub trials: u32,
    /// The pool's own time per event, in nanoseconds: without the time inside driver calls.
    pub ns_per_event: f64,
    /// The driver calls, building the pool among them.
    pub driver_calls: CallCounts,
    /// The time of these calls: measured, or what the device's model says where it has one.
    pub driver_time: Duration,
    /// Whether that time is a model's.
    pub modelled: bool,
}

/// How far a search is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Trial {
    /// Which capacity is being tried, counted from one.
    pub number: u32,
    /// That capacity, in bytes.
    pub capacity_bytes: u64,
    /// The events done.
    pub events: usize,
}

/// Finds the smallest capacity, to one page, at which the whole trace completes in one cold pass on a fresh pool, and still
/// completes at eight larger capacities, spread evenly up to 1.05 times it.
///
/// `builder` describes the pool but for the device and for the maximum, which is each trial's own.
///
/// The first trial has the whole device. Then capacities are tried upwards from the peak of the live bytes (or the pool's
/// initial size, where that is more), in steps that double, and between the last that failed and the first that completed,
/// by halving. Where one of the eight larger ones fails, the search goes on above it. In the end, capacities of 1.1, 1.25,
/// 1.5 and 2 times the one that was found are tried, as far as the device goes; that one of them fails changes nothing but
/// [`Capacity::first_failure_above`]. Not every capacity is tried, so where completing comes and goes a smaller one may do
/// as well.
///
/// `progress` is called now and then, outside of what is timed.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// use vrampool::trace::{Fit, Trace, min_capacity};
/// use vrampool::{Device, Pool};
///
/// let log = "Thread,Time,Action,Pointer,Size,Stream\n1,0.5,allocate,0x7f0000000000,3145728,0\n";
/// let trace = Trace::read("example", log.as_bytes())?;
/// match min_capacity(&trace, &Device::simulated(), Pool::builder(), &mut |_| {})? {
///     Fit::Smallest(capacity) => assert_eq!(capacity.bytes, 4 << 20, "two pages of 2 MiB"),
///     Fit::Nowhere(failure) => panic!("{}", failure.error),
///     _ => unreachable!(),
/// }
/// # }
/// # Ok::<(), vrampool::Error>(())
/// ```
///
/// # Errors
/// Those of [`PoolBuilder::build`], and of a request that fails for another reason than a lack of memory in a trial with
/// less than the whole device. That the trace does not complete is no error here.
///
/// # Complexity
/// O(log(capacity − live)) passes over the trace, and again as many wherever one of the eight fails; of those that fail, the
/// part up to the failure.
pub fn min_capacity(trace: &Trace, device: &Device, builder: PoolBuilder, progress: &mut dyn FnMut(Trial)) -> Result<Fit> {
    // What the device bounds, and what a pool takes to begin with.
    let whole = builder.clone().device(device.clone()).maximum(u64::MAX).build()?;
    let page_bytes = whole.page_bytes();
    let total = if whole.kind() == MemoryKind::Device { device.properties()?.total_bytes } else { u64::MAX };
    let initial = whole.statistics().reserved_bytes;
    drop(whole);

    let highest = (total / page_bytes).max(1);
    let lowest = trace.peak_live_bytes().max(initial).div_ceil(page_bytes).clamp(1, highest);
    let (mut number, mut last) = (0, None);
    let found = smallest(lowest, highest, |pages| -> Result<Option<Report>> {
        number += 1;
        let capacity_bytes = pages * page_bytes;
        let report = attempt(trace, device, builder.clone().maximum(capacity_bytes), &mut |pass| {
            progress(Trial { number, capacity_bytes, events: pass.events });
        })?;
        match report.first_failure {
            None => Ok(Some(report)),
            Some(failure) if pages == highest || failure.error.is_out_of_memory() => {
                last = Some(failure);
                Ok(None)
            }
            Some(failure) => Err(failure.error),
        }
    })?;
    Ok(match found {
        Some(Found { pages, first_failure_above, outcome: pass }) => Fit::Smallest(Capacity {
            bytes: pages * page_bytes,
            first_failure_above: first_failure_above.map(|pages| pages * page_bytes),
            trials: number,
            ns_per_event: pass.cold_ns_per_event,
            driver_calls: pass.driver_calls_cold,
            driver_time: pass.driver_time_cold,
            modelled: pass.modelled,
        }),
        None => Fit::Nowhere(last.expect("only a failed trial with the whole device ends the search so")),
    })
}

/// What a search found.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(unreachable_pub, reason = "for tests and benches")]
pub struct Found<T> {
    /// The capacity, in pages.
    pub pages: u64,
    /// The smallest of those tried above it that failed.
    pub first_failure_above: Option<u64>,
    /// What the trial at this capacity gave.
    pub outcome: T,
}

/// The search, whatever is tried: the smallest number of pages from `lowest` (at least one) to `highest` at which `trial` gives
/// something and still does a little above, as [`min_capacity`] says. No capacity is tried twice. `None` where the trial with
/// `highest` pages gives nothing.
///
/// # Errors
/// Those of `trial`.
#[allow(unreachable_pub, reason = "for tests and benches")]
pub fn smallest<T, E>(lowest: u64, highest: u64, trial: impl FnMut(u64) -> Result<Option<T>, E>) -> Result<Option<Found<T>>, E> {
    let mut trials = Trials { trial, outcomes: BTreeMap::new() };
    if !trials.completes(highest)? {
        return Ok(None);
    }
    let mut least = lowest;
    let pages = loop {
        let (mut below, mut fits, mut step) = (least.saturating_sub(1), least, 1);
        while !trials.completes(fits)? {
            below = fits;
            fits = least.saturating_add(step).min(highest);
            step *= 2;
        }
        while fits - below > 1 {
            let middle = below + (fits - below) / 2;
            *(if trials.completes(middle)? { &mut fits } else { &mut below }) = middle;
        }
        // The largest first: the search goes on above the largest that fails.
        match trials.first_failure(probes(fits).rev().filter(|&probe| fits < probe && probe <= highest))? {
            Some(failed) => least = failed + 1,
            None => break fits,
        }
    };
    trials.first_failure(BEYOND.into_iter().map(|hundredths| share(pages, hundredths, 100)).filter(|&probe| probe <= highest))?;
    let above = trials.outcomes.range(pages + 1..);
    let first_failure_above = above.clone().find(|(_, outcome)| outcome.is_none()).map(|(&pages, _)| pages);
    Ok(trials.outcomes.remove(&pages).flatten().map(|outcome| Found { pages, first_failure_above, outcome }))
}

/// The larger capacities at which the trace is to complete, too. Those of few pages are the capacity itself, and each other.
fn probes(pages: u64) -> impl DoubleEndedIterator<Item = u64> {
    (1..=PROBES).map(move |number| pages.saturating_add(share(pages, number, PROBES * PROBED_SHARE)))
}

fn share(pages: u64, numerator: u64, denominator: u64) -> u64 {
    u64::try_from(u128::from(pages) * u128::from(numerator) / u128::from(denominator)).unwrap_or(u64::MAX)
}

/// Trials and what they gave, by pages.
struct Trials<T, F> {
    trial: F,
    outcomes: BTreeMap<u64, Option<T>>,
}

impl<T, E, F: FnMut(u64) -> Result<Option<T>, E>> Trials<T, F> {
    fn completes(&mut self, pages: u64) -> Result<bool, E> {
        if let Some(known) = self.outcomes.get(&pages) {
            return Ok(known.is_some());
        }
        let outcome = (self.trial)(pages)?;
        let completes = outcome.is_some();
        self.outcomes.insert(pages, outcome);
        Ok(completes)
    }

    fn first_failure(&mut self, mut pages: impl Iterator<Item = u64>) -> Result<Option<u64>, E> {
        pages
            .find_map(|pages| match self.completes(pages) {
                Ok(true) => None,
                Ok(false) => Some(Ok(pages)),
                Err(error) => Some(Err(error)),
            })
            .transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::convert::Infallible;

    /// Searches with a made-up trial. What came of it, and what was tried in order.
    fn search(lowest: u64, highest: u64, completes: impl Fn(u64) -> bool) -> (Option<Found<u64>>, Vec<u64>) {
        let mut tried = Vec::new();
        let found = smallest(lowest, highest, |pages| -> Result<_, Infallible> {
            tried.push(pages);
            Ok(completes(pages).then_some(pages))
        });
        let Ok(found) = found;
        (found, tried)
    }

    /// What the search is to find, by trying everything: does it complete here and at all eight above?
    fn is_sound(pages: u64, highest: u64, completes: impl Fn(u64) -> bool) -> bool {
        let above = (1..=8).map(|number| (pages as f64 * (1.0 + 0.05 * f64::from(number) / 8.0) + 1e-6) as u64);
        completes(pages) && above.filter(|&probe| probe <= highest).all(completes)
    }

    #[test]
    fn probes_reach_one_twentieth_above() {
        assert_eq!(probes(1600).collect::<Vec<_>>(), [1610, 1620, 1630, 1640, 1650, 1660, 1670, 1680]);
        assert_eq!(probes(40).collect::<Vec<_>>(), [40, 40, 40, 41, 41, 41, 41, 42]);
        assert_eq!(probes(u64::MAX).last(), Some(u64::MAX));
    }

    #[test]
    fn a_failing_probe_sends_the_search_above_it() {
        // From 1000 on it completes, but at 1031, which is a probe of 1000, and at 1548, which is one and a half times 1032.
        let (found, tried) = search(900, 4000, |pages| pages >= 1000 && pages != 1031 && pages != 1548);
        assert!(tried.contains(&1000) && tried.contains(&1031), "{tried:?}");
        assert_eq!(found, Some(Found { pages: 1032, first_failure_above: Some(1548), outcome: 1032 }));
    }

    #[test]
    fn ends_of_the_range() {
        assert_eq!(search(5, 100, |_| true).0.map(|found| (found.pages, found.first_failure_above)), Some((5, None)));
        assert_eq!(search(5, 100, |pages| pages == 100).0.map(|found| found.pages), Some(100));
        assert_eq!(search(7, 7, |_| true), (Some(Found { pages: 7, first_failure_above: None, outcome: 7 }), vec![7]));
        assert_eq!(search(1, 100, |pages| pages < 100), (None, vec![100]), "the whole device is tried first, and alone");
        assert_eq!(search(1, u64::MAX, |pages| pages > 1 << 40).0.map(|found| found.pages), Some((1 << 40) + 1));
    }

    #[test]
    fn an_error_ends_the_search() {
        let mut trials = 0;
        let found: Result<Option<Found<()>>, &str> = smallest(1, 100, |pages| {
            trials += 1;
            if pages < 100 { Err("no driver") } else { Ok(Some(())) }
        });
        assert_eq!((found, trials), (Err("no driver"), 2));
    }

    proptest! {
        #[test]
        fn where_more_is_always_enough_the_smallest_is_found(lowest in 1u64..500, excess in 0u64..5000, room in 0u64..5000) {
            let (least, highest) = (lowest + excess, lowest + excess + room);
            let (found, tried) = search(lowest, highest, |pages| pages >= least);
            prop_assert_eq!(found, Some(Found { pages: least, first_failure_above: None, outcome: least }));
            prop_assert!(tried.len() <= 45, "{}", tried.len());
        }

        #[test]
        fn where_more_may_be_too_little_what_is_found_is_sound(
            lowest in 1u64..300,
            outcomes in proptest::collection::vec(proptest::bool::weighted(0.7), 1..300),
        ) {
            // The last completes, so there is something to find.
            let highest = lowest + outcomes.len() as u64;
            let completes = |pages: u64| pages == highest || outcomes[(pages - lowest) as usize];
            let (found, mut tried) = search(lowest, highest, completes);
            let found = found.expect("the last completes");
            prop_assert!(is_sound(found.pages, highest, completes));
            prop_assert!(found.pages == lowest || !completes(found.pages - 1), "a page less does not do, and was tried or excluded");
            let sound = (lowest..=highest).find(|&pages| is_sound(pages, highest, completes));
            prop_assert!(sound <= Some(found.pages));
            prop_assert_eq!(found.outcome, found.pages);

            let failure = tried.iter().copied().filter(|&pages| pages > found.pages && !completes(pages)).min();
            prop_assert_eq!(found.first_failure_above, failure);
            tried.sort_unstable();
            prop_assert!(tried.is_sorted_by(|before, after| before < after), "nothing is tried twice");
            prop_assert!(tried.iter().all(|pages| (lowest..=highest).contains(pages)));
        }
    }
}

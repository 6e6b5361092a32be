//! The works that are timed, and their figures.

use super::books::Books;
use super::subject::{Refusal, Subject};
use crate::Failure;
use std::sync::mpsc::{Receiver, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Allocations of the work `pair`, and then frees.
pub(crate) const PAIRS: usize = 64;
/// Slots of a thread of the work `churn`.
pub(crate) const SLOTS: usize = 256;
/// Slots that one round of `churn` frees and then fills again.
const ROUND: usize = 32;
const ROUNDS: usize = 256;
/// Rounds of `churn` under the check.
const CHECKED_ROUNDS: usize = 16;

/// Repetitions that are timed: enough for a steady median, fewer where each takes long, and one where each takes very long.
const MOST_REPETITIONS: usize = 101;
const FEW_REPETITIONS: usize = 3;
const LONG: Duration = Duration::from_millis(250);
const VERY_LONG: Duration = Duration::from_secs(2);

/// The times of one row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Figures {
    /// Of one allocation, the median.
    pub(crate) alloc_ns: f64,
    /// Of one free, the median.
    pub(crate) free_ns: f64,
    /// Of all threads together.
    pub(crate) pairs_per_second: f64,
    /// Whether the times are a model's.
    pub(crate) modelled: bool,
}

/// Reads the time that counts for a subject, in nanoseconds: the model's where it has one.
struct Clock<'a, S>(&'a S, Instant);

impl<'a, S: Subject> Clock<'a, S> {
    fn new(subject: &'a S) -> Self {
        Self(subject, Instant::now())
    }

    fn ns(&self) -> u64 {
        self.0.modelled_ns().unwrap_or_else(|| u64::try_from(self.1.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

/// The times of some allocations and of as many frees, in nanoseconds each.
#[derive(Default)]
struct Samples {
    alloc_ns: Vec<f64>,
    free_ns: Vec<f64>,
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n.is_multiple_of(2) => f64::midpoint(values[n / 2 - 1], values[n / 2]),
        n => values[n / 2],
    }
}

/// What `busy_ns` nanoseconds for `pairs` pairs come to in a second.
fn rate(pairs: usize, busy_ns: f64) -> f64 {
    // A clock too coarse to see the work is as good as one nanosecond.
    pairs as f64 * 1e9 / busy_ns.max(1.0)
}

/// The blocks of one thread, freed on every way out.
struct Blocks<'a, S: Subject> {
    subject: &'a S,
    books: Option<&'a Books>,
    /// Address and size, where a block is.
    slots: Vec<Option<(u64, u64)>>,
}

impl<'a, S: Subject> Blocks<'a, S> {
    fn new(subject: &'a S, books: Option<&'a Books>, slots: usize) -> Self {
        Self { subject, books, slots: vec![None; slots] }
    }

    fn allocate(&mut self, slot: usize, size: u64) -> Result<(), Refusal> {
        let address = self.subject.allocate(size)?;
        self.slots[slot] = Some((address, size));
        self.books.map_or(Ok(()), |books| books.enter(address, size)).map_err(Refusal::Failed)
    }

    fn free(&mut self, slot: usize) -> Result<(), Refusal> {
        let Some((address, size)) = self.slots[slot].take() else { return Ok(()) };
        if let Some(books) = self.books {
            books.leave(address);
        }
        self.subject.free(address, size).map_err(Refusal::Failed)
    }

    fn free_all(&mut self) -> Result<(), Refusal> {
        (0..self.slots.len()).try_for_each(|slot| self.free(slot))
    }
}

impl<S: Subject> Drop for Blocks<'_, S> {
    fn drop(&mut self) {
        // What led here is told already.
        for slot in 0..self.slots.len() {
            let _ = self.free(slot);
        }
    }
}

/// 64 allocations of one size and then 64 frees, in the order of the allocations.
pub(crate) fn pair<S: Subject>(subject: &S, size: u64) -> Result<Figures, Refusal> {
    let books = Books::default();
    let mut checked = Blocks::new(subject, Some(&books), PAIRS);
    (0..PAIRS).try_for_each(|slot| checked.allocate(slot, size))?;
    checked.free_all()?;

    let clock = Clock::new(subject);
    let mut blocks = Blocks::new(subject, None, PAIRS);
    let mut samples = Samples::default();
    let start = Instant::now();
    // The first repetition warms up, but where it takes so long that there is nothing to warm.
    for repetition in 0..=MOST_REPETITIONS {
        let from = clock.ns();
        (0..PAIRS).try_for_each(|slot| blocks.allocate(slot, size))?;
        let middle = clock.ns();
        blocks.free_all()?;
        let to = clock.ns();
        let elapsed = start.elapsed();
        if repetition > 0 || elapsed > VERY_LONG {
            samples.alloc_ns.push((middle - from) as f64 / PAIRS as f64);
            samples.free_ns.push((to - middle) as f64 / PAIRS as f64);
        }
        if elapsed > VERY_LONG || (elapsed > LONG && repetition >= FEW_REPETITIONS) {
            break;
        }
    }
    let (alloc_ns, free_ns) = (median(&mut samples.alloc_ns), median(&mut samples.free_ns));
    let modelled = subject.modelled_ns().is_some();
    Ok(Figures { alloc_ns, free_ns, pairs_per_second: rate(1, alloc_ns + free_ns), modelled })
}

/// SplitMix64 (Steele, Lea, Flood 2014): the same draws on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 256 B to 1 MiB, evenly in the logarithm.
    fn size(&mut self) -> u64 {
        let octaves = (self.next() >> 11) as f64 / (1u64 << 53) as f64 * 12.0;
        (octaves.exp2() * 256.0) as u64
    }
}

/// What one thread of `churn` does, drawn before the clock runs.
struct Script {
    /// The sizes that the slots begin with.
    first: Vec<u64>,
    /// Each a few different slots, and the sizes that come next there.
    rounds: Vec<Vec<(usize, u64)>>,
}

impl Script {
    fn new(thread: usize) -> Self {
        let mut random = Random(thread as u64);
        let first = (0..SLOTS).map(|_| random.size()).collect();
        let mut slots: Vec<usize> = (0..SLOTS).collect();
        let mut round = || {
            // The first places of a shuffle.
            for place in 0..ROUND {
                let other = place + (random.next() % (SLOTS - place) as u64) as usize;
                slots.swap(place, other);
            }
            slots[..ROUND].iter().map(|&slot| (slot, random.size())).collect()
        };
        let rounds = (0..ROUNDS).map(|_| round()).collect();
        Self { first, rounds }
    }
}

/// A thread's part of `churn`.
struct Churned {
    samples: Samples,
    busy_ns: f64,
}

impl Churned {
    fn pairs(&self) -> usize {
        self.samples.alloc_ns.len() * ROUND
    }
}

fn churn_alone<S: Subject>(subject: &S, script: &Script, books: Option<&Books>, rounds: usize) -> Result<Churned, Refusal> {
    let mut blocks = Blocks::new(subject, books, SLOTS);
    script.first.iter().enumerate().try_for_each(|(slot, &size)| blocks.allocate(slot, size))?;
    let clock = Clock::new(subject);
    let mut churned = Churned { samples: Samples::default(), busy_ns: 0.0 };
    let start = Instant::now();
    for round in &script.rounds[..rounds] {
        let from = clock.ns();
        round.iter().try_for_each(|&(slot, _)| blocks.free(slot))?;
        let middle = clock.ns();
        round.iter().try_for_each(|&(slot, size)| blocks.allocate(slot, size))?;
        let to = clock.ns();
        churned.samples.free_ns.push((middle - from) as f64 / ROUND as f64);
        churned.samples.alloc_ns.push((to - middle) as f64 / ROUND as f64);
        churned.busy_ns += (to - from) as f64;
        if start.elapsed() > VERY_LONG {
            break;
        }
    }
    blocks.free_all()?;
    Ok(churned)
}

/// One pass of all threads at once.
fn churn_together<S: Subject>(subject: &S, scripts: &[Script], books: Option<&Books>, rounds: usize) -> Result<Vec<Churned>, Refusal> {
    std::thread::scope(|scope| {
        let mut starts = Vec::with_capacity(scripts.len());
        let mut threads = Vec::with_capacity(scripts.len());
        for script in scripts {
            let (start, started): (_, Receiver<()>) = channel();
            // A thread that is never started ends when its sender goes.
            let work = move || started.recv().ok().map(|()| churn_alone(subject, script, books, rounds));
            let thread = Builder::new().spawn_scoped(scope, work);
            threads.push(thread.map_err(|error| Refusal::Memory(format!("{} threads cannot be had: {error}", scripts.len())))?);
            starts.push(start);
        }
        for start in starts {
            // A thread that is gone has nothing to be told.
            let _ = start.send(());
        }
        let ended = |_| Refusal::Failed(Failure::Work("a thread of the benchmark panicked".to_owned()));
        let mut all = Vec::with_capacity(threads.len());
        for thread in threads {
            all.extend(thread.join().map_err(ended)?);
        }
        all.into_iter().collect()
    })
}

/// Each thread frees some of its 256 slots and fills them again, over and over.
///
/// A model's clock is one for all threads. There the threads go one after the other: the times are of calls that never
/// wait for each other, and the rate is that of a driver that serves one call at a time.
pub(crate) fn churn<S: Subject>(subject: &S, threads: usize) -> Result<Figures, Refusal> {
    let scripts: Vec<Script> = (0..threads).map(Script::new).collect();
    let books = Books::default();
    churn_together(subject, &scripts, Some(&books), CHECKED_ROUNDS)?;
    let modelled = subject.modelled_ns().is_some();
    let all = if modelled {
        scripts.iter().map(|script| churn_alone(subject, script, None, ROUNDS)).collect::<Result<Vec<_>, _>>()?
    } else {
        // Once to warm up.
        churn_together(subject, &scripts, None, ROUNDS)?;
        churn_together(subject, &scripts, None, ROUNDS)?
    };
    let pairs_per_second = if modelled {
        rate(all.iter().map(Churned::pairs).sum(), all.iter().map(|churned| churned.busy_ns).sum())
    } else {
        all.iter().map(|churned| rate(churned.pairs(), churned.busy_ns)).sum()
    };
    let mut alloc_ns: Vec<f64> = all.iter().flat_map(|churned| churned.samples.alloc_ns.iter().copied()).collect();
    let mut free_ns: Vec<f64> = all.iter().flat_map(|churned| churned.samples.free_ns.iter().copied()).collect();
    Ok(Figures { alloc_ns: median(&mut alloc_ns), free_ns: median(&mut free_ns), pairs_per_second, modelled })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vrampool::units::MIB;

    #[test]
    fn medians() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn sizes_are_even_in_the_logarithm() {
        let mut random = Random(1);
        let mut octaves = [0; 12];
        for _ in 0..12_000 {
            let size = random.size();
            assert!((256..=MIB).contains(&size));
            octaves[((size / 256).ilog2() as usize).min(11)] += 1;
        }
        // Each is binomial with mean 1000 and deviation 30.
        assert!(octaves.iter().all(|count| (850..1150).contains(count)), "{octaves:?}");
    }

    #[test]
    fn a_round_has_no_slot_twice() {
        let script = Script::new(3);
        assert_eq!((script.first.len(), script.rounds.len()), (SLOTS, ROUNDS));
        for round in &script.rounds {
            let mut slots: Vec<usize> = round.iter().map(|&(slot, _)| slot).collect();
            slots.sort_unstable();
            slots.dedup();
            assert!(slots.len() == ROUND && slots.iter().all(|&slot| slot < SLOTS));
        }
    }
}

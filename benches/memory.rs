//! How much memory the pool takes for a work, beside two classic buddy allocators, and how long it takes.
//!
//! ```sh
//! cargo bench --bench memory                       # the traces in tests/data/traces, and RMM's random_allocations
//! cargo bench --bench memory -- FOLDER TRACE…      # these traces, and RMM's random_allocations
//! ```
//!
//! It prints one table in Markdown. Every subject first does the whole work with a check that no two live blocks overlap;
//! then a fresh one does it several times, each time freeing in the end what the work leaves live. *Reserved* is the most
//! that is held from the device in the first two passes, over the peak of the bytes requested that are live; the time, per
//! event, is that of the fastest pass after the first.

#[allow(dead_code, reason = "the capacity benchmark uses the rest")]
mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::arenas::{Arenas, Block};
use support::random_allocations::random_allocations;
use support::traces;
use support::work::{Event, Work};
use vrampool::buddy::classic::Tails;
use vrampool::driver::Meter;
use vrampool::driver::sim::SimDriver;
use vrampool::units::{DeviceId, DevicePtr};
use vrampool::{Device, Pool};

/// What is measured.
trait Subject {
    /// A live block.
    type Block: Copy;

    fn allocate(&mut self, bytes: u64) -> Self::Block;
    fn free(&mut self, block: Self::Block);
    /// Where a block lies: no two live blocks with the same first part may overlap by the second, in bytes.
    fn place(block: Self::Block) -> (usize, u64);
    /// The most that was held from the device.
    fn peak_reserved_bytes(&self) -> u64;
    /// Whether all is well when nothing is live.
    fn check_idle(&self);
}

impl Subject for Arenas {
    type Block = Block;

    fn allocate(&mut self, bytes: u64) -> Block {
        self.allocate(bytes)
    }

    fn free(&mut self, block: Block) {
        self.free(block);
    }

    fn place(block: Block) -> (usize, u64) {
        Self::place(block)
    }

    fn peak_reserved_bytes(&self) -> u64 {
        // Arenas are never given back.
        self.reserved_bytes()
    }

    fn check_idle(&self) {
        self.check().expect("the arenas are in order");
    }
}

/// The pool on the simulated device.
#[derive(Debug)]
struct Simulated {
    pool: Pool,
    meter: Arc<Meter>,
}

impl Simulated {
    fn new() -> Self {
        let meter = Arc::new(Meter::new(SimDriver::h200()));
        let device = Device::new(meter.clone(), DeviceId(0)).expect("there is a device 0");
        let pool = Pool::builder().device(device).build().expect("the simulated device has memory");
        Self { pool, meter }
    }
}

impl Subject for Simulated {
    type Block = DevicePtr;

    fn allocate(&mut self, bytes: u64) -> DevicePtr {
        self.pool.allocate(bytes).expect("the work fits the simulated device")
    }

    fn free(&mut self, block: DevicePtr) {
        #[allow(unsafe_code, reason = "freeing by address is unsafe")]
        // SAFETY: the simulated device has no work queued.
        unsafe { self.pool.deallocate(block) }.expect("the block is live");
    }

    fn place(block: DevicePtr) -> (usize, u64) {
        (0, block.address())
    }

    fn peak_reserved_bytes(&self) -> u64 {
        self.meter.peak_reserved_bytes()
    }

    fn check_idle(&self) {
        assert_eq!(self.pool.statistics().live_bytes, 0, "everything was freed");
    }
}

/// Does the work once and frees what it leaves.
fn pass<S: Subject>(subject: &mut S, work: &Work, blocks: &mut Vec<Option<S::Block>>) {
    blocks.clear();
    for event in &work.events {
        match *event {
            Event::Allocate(size) => blocks.push(Some(subject.allocate(size))),
            Event::Free(number) => {
                if let Some(block) = blocks[number].take() {
                    subject.free(block);
                }
            }
        }
    }
    for block in blocks.drain(..).flatten() {
        subject.free(block);
    }
}

/// Does the work once and panics where two live blocks overlap.
fn checked_pass<S: Subject>(subject: &mut S, work: &Work) {
    let mut taken: BTreeMap<(usize, u64), u64> = BTreeMap::new();
    let mut blocks = Vec::new();
    for event in &work.events {
        match *event {
            // All blocks of no bytes may have one address.
            Event::Allocate(0) => blocks.push(subject.allocate(0)),
            Event::Allocate(size) => {
                let block = subject.allocate(size);
                let (space, start) = S::place(block);
                let before = taken.range(..(space, start + size)).next_back();
                assert!(before.is_none_or(|((other, at), length)| *other != space || at + length <= start), "{}: an overlap", work.name);
                taken.insert((space, start), size);
                blocks.push(block);
            }
            Event::Free(number) => {
                taken.remove(&S::place(blocks[number]));
                subject.free(blocks[number]);
            }
        }
    }
}

/// How long a work is repeated, for a steady figure.
const REPEAT: Duration = Duration::from_millis(200);

/// Reserved over live, and nanoseconds per event.
fn measure<S: Subject>(make: impl Fn() -> S, work: &Work) -> (f64, f64) {
    checked_pass(&mut make(), work);
    let mut subject = make();
    let mut blocks = Vec::new();
    pass(&mut subject, work, &mut blocks);
    let mut timed = |subject: &mut S| {
        let started = Instant::now();
        pass(subject, work, &mut blocks);
        started.elapsed()
    };
    let (mut fastest, begun) = (timed(&mut subject), Instant::now());
    let reserved = subject.peak_reserved_bytes();
    while begun.elapsed() < REPEAT {
        fastest = fastest.min(timed(&mut subject));
    }
    subject.check_idle();
    (reserved as f64 / work.peak_live_bytes() as f64, fastest.as_nanos() as f64 / work.events.len() as f64)
}

/// The ratios to be summed up below the table.
#[derive(Default)]
struct Summary {
    ratios: [Vec<f64>; 3],
}

impl Summary {
    fn row(&mut self, work: &Work) {
        let measured =
            [measure(|| Arenas::new(Tails::Kept), work), measure(|| Arenas::new(Tails::GivenBack), work), measure(Simulated::new, work)];
        let live = work.peak_live_bytes() as f64 / f64::from(1 << 20);
        let [(kept, kept_ns), (given, given_ns), (pool, pool_ns)] = measured;
        println!(
            "| {} | {} | {live:.0} | {kept:.3} | {given:.3} | **{pool:.3}** | {kept_ns:.0} | {given_ns:.0} | {pool_ns:.0} |",
            work.name,
            work.events.len()
        );
        for (ratios, (ratio, _)) in self.ratios.iter_mut().zip(measured) {
            ratios.push(ratio);
        }
    }

    fn print(&self, name: &str, of: impl Fn(&[f64]) -> f64) {
        let [kept, given, pool] = [0, 1, 2].map(|column| of(&self.ratios[column]));
        println!("| {name} | | | {kept:.3} | {given:.3} | **{pool:.3}** | | | |");
    }
}

fn geometric_mean(values: &[f64]) -> f64 {
    (values.iter().map(|value| value.ln()).sum::<f64>() / values.len() as f64).exp()
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

fn main() -> ExitCode {
    // Cargo passes `--bench`.
    let mut named: Vec<PathBuf> = std::env::args_os().skip(1).filter(|argument| argument != "--bench").map(PathBuf::from).collect();
    if named.is_empty() {
        named.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/traces"));
    }
    let works = match traces::read_all(&named) {
        Ok(works) => works,
        Err(why) => {
            eprintln!("memory: {why}");
            return ExitCode::from(2);
        }
    };
    println!(
        "| work | events | peak live MiB | classic buddy: reserved / live | tails given back | pool | classic buddy: ns / event | tails given back | pool |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|--:|");
    let mut traces = Summary::default();
    for (work, _) in &works {
        traces.row(work);
    }
    traces.print("*traces, geometric mean*", geometric_mean);
    traces.print("*traces, worst*", largest);
    let mut random = Summary::default();
    for count in [1000, 10_000, 100_000] {
        for largest_mib in [1, 64, 1024, 4096] {
            random.row(&random_allocations(count, largest_mib));
        }
    }
    random.print("*random, geometric mean*", geometric_mean);
    random.print("*random, worst*", largest);
    ExitCode::SUCCESS
}

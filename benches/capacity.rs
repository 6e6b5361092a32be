//! The smallest capacity with which a work can be done, by the pool and by allocators that cannot move memory.
//!
//! ```sh
//! cargo bench --bench capacity                       # RMM's random_allocations
//! cargo bench --bench capacity -- FOLDER TRACE…      # these traces instead
//! ```
//!
//! It prints a table in Markdown. A capacity is whole pages of 2 MiB, and is looked for as `vrampool min-capacity` looks for it.

#[allow(dead_code, reason = "the memory benchmark uses the rest")]
mod support;

use std::convert::Infallible;
use std::path::PathBuf;
use std::process::ExitCode;
use support::contiguous::{Choice, Contiguous, GRAIN};
use support::random_allocations::random_allocations;
use support::traces;
use support::work::{Event, Work};
use vrampool::buddy::classic::{ClassicBuddy, Tails};
use vrampool::trace::{Fit, Trace, min_capacity, smallest};
use vrampool::units::MIB;
use vrampool::{Device, Pool};

const PAGE_BYTES: u64 = 2 * MIB;
/// No allocator is given more than so many times what is live.
const MOST: u64 = 64;

/// Whether a work can be done: every allocation gets a place.
fn completes(work: &Work, mut allocate: impl FnMut(Option<u64>, u64) -> Option<u64>) -> bool {
    let mut places = Vec::new();
    for event in &work.events {
        match *event {
            Event::Allocate(size) => match allocate(None, size) {
                Some(place) => places.push(place),
                None => return false,
            },
            Event::Free(number) => {
                allocate(Some(places[number]), 0);
            }
        }
    }
    true
}

fn contiguous(work: &Work, bytes: u64, choice: Choice) -> bool {
    let mut memory = Contiguous::new(bytes / GRAIN, choice);
    completes(work, |freed, size| match freed {
        Some(place) => {
            memory.free(place);
            None
        }
        None => memory.allocate(size),
    })
}

fn buddy(work: &Work, bytes: u64) -> bool {
    let mut memory = ClassicBuddy::new(bytes / GRAIN, Tails::Kept);
    completes(work, |freed, size| match freed {
        Some(place) => {
            memory.free(place).expect("the block is live");
            None
        }
        None => memory.allocate(size.div_ceil(GRAIN).max(1)),
    })
}

/// The smallest capacity over the peak of the live bytes, for an allocator that can or cannot do the work with so many bytes.
fn ratio(work: &Work, can: impl Fn(u64) -> bool) -> f64 {
    let live = work.peak_live_bytes();
    let pages = live.div_ceil(PAGE_BYTES).max(1);
    let found = smallest(pages, pages * MOST, |pages| -> Result<_, Infallible> { Ok(can(pages * PAGE_BYTES).then_some(())) });
    let Ok(found) = found;
    found.map_or(f64::INFINITY, |found| (found.pages * PAGE_BYTES) as f64 / live as f64)
}

/// The work in RMM's form.
fn as_trace(work: &Work) -> Trace {
    let mut log = "Thread,Time,Action,Pointer,Size,Stream\n".to_owned();
    let mut allocated = 0;
    for event in &work.events {
        // No block has address 0.
        match *event {
            Event::Allocate(size) => {
                allocated += 1;
                log += &format!("1,0,allocate,{allocated},{size},0\n");
            }
            Event::Free(number) => log += &format!("1,0,free,{},0,0\n", number + 1),
        }
    }
    Trace::read(&work.name, log.as_bytes()).expect("the log is in order")
}

fn row(work: &Work, trace: &Trace, is_recorded: bool) {
    let fit = min_capacity(trace, &Device::simulated(), Pool::builder(), &mut |_| {}).expect("the simulated device does not fail");
    let Fit::Smallest(capacity) = fit else { panic!("{}: {fit:?}", work.name) };
    let live = work.peak_live_bytes();
    let driver_ms = capacity.driver_time.as_secs_f64() * 1e3;
    let share = if is_recorded { format!("{:.2} %", driver_ms * 1e8 / trace.duration_ns() as f64) } else { "–".to_owned() };
    println!(
        "| {} | {:.0} | {:.0} | **{:.4}** | {driver_ms:.1} | {share} | {:.3} | {:.3} | {:.3} |",
        work.name,
        live as f64 / MIB as f64,
        capacity.bytes as f64 / MIB as f64,
        capacity.bytes as f64 / live as f64,
        ratio(work, |bytes| contiguous(work, bytes, Choice::First)),
        ratio(work, |bytes| contiguous(work, bytes, Choice::Best)),
        ratio(work, |bytes| buddy(work, bytes)),
    );
}

fn main() -> ExitCode {
    // Cargo passes `--bench`.
    let named: Vec<PathBuf> = std::env::args_os().skip(1).filter(|argument| argument != "--bench").map(PathBuf::from).collect();
    println!(
        "| work | peak live MiB | capacity MiB | capacity / live | driver ms | of the recorded time | first fit: capacity / live | best fit | classic buddy |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|--:|");
    if named.is_empty() {
        for count in [1000, 10_000, 100_000] {
            for largest_mib in [1, 64, 1024, 4096] {
                let work = random_allocations(count, largest_mib);
                row(&work, &as_trace(&work), false);
            }
        }
        return ExitCode::SUCCESS;
    }
    match traces::read_all(&named) {
        Ok(recorded) => {
            for (work, trace) in &recorded {
                row(work, trace, true);
            }
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("capacity: {why}");
            ExitCode::from(2)
        }
    }
}

//! `vrampool bench`: what an allocation and a free cost, of the driver, of the pool, and of an allocator of host memory.

mod books;
#[allow(unsafe_code)] // Frees by address: the pool's and mimalloc's.
mod subject;
mod table;
mod work;

use crate::args::BenchArguments;
use crate::device::{Selected, select};
use crate::{Failure, output};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};
use std::process::ExitCode;
use subject::{Host, Ordered, Plain, Refusal, Subject};
use vrampool::driver::{DeviceProperties, MemoryKind};
use vrampool::units::{KIB, MIB};
use vrampool::{Pool, PoolBuilder};
use work::Figures;

const SIZES: [u64; 11] = [256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB];
const THREADS: [usize; 5] = [1, 2, 4, 8, 16];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Allocator {
    Driver,
    /// The driver's own stream-ordered allocator.
    DriverAsync,
    Pool,
    Host,
}

impl Allocator {
    /// Those that serve memory of a kind on a device.
    fn of(kind: MemoryKind, properties: &DeviceProperties) -> Vec<Self> {
        let all = [Self::Driver, Self::DriverAsync, Self::Pool, Self::Host];
        let is_there = |allocator: &Self| *allocator != Self::DriverAsync || (kind == MemoryKind::Device && properties.memory_pools);
        all.into_iter().filter(is_there).collect()
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Driver => "driver",
            Self::DriverAsync => "driver_async",
            Self::Pool => "vrampool",
            Self::Host => "mimalloc",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Work {
    /// Of one size, by one thread.
    Pair(u64),
    /// By so many threads.
    Churn(usize),
}

impl Work {
    const fn name(self) -> &'static str {
        match self {
            Self::Pair(_) => "pair",
            Self::Churn(_) => "churn",
        }
    }

    const fn size(self) -> Option<u64> {
        match self {
            Self::Pair(size) => Some(size),
            Self::Churn(_) => None,
        }
    }

    const fn threads(self) -> usize {
        match self {
            Self::Pair(_) => 1,
            Self::Churn(threads) => threads,
        }
    }
}

/// One allocator at one work: its figures, or why there are none.
struct Row {
    allocator: Allocator,
    work: Work,
    outcome: Result<Figures, String>,
}

pub(crate) fn run(arguments: &BenchArguments) -> Result<ExitCode, Failure> {
    let sizes = if arguments.sizes.is_empty() { SIZES.to_vec() } else { arguments.sizes.clone() };
    let threads = if arguments.threads.is_empty() { default_threads() } else { arguments.threads.clone() };
    let works: Vec<Work> = sizes.into_iter().map(Work::Pair).chain(threads.into_iter().map(Work::Churn)).collect();
    let selected = select(arguments.common.device)?;
    let mut builder = Pool::builder().configure_from_env()?.device(selected.device.clone());
    if let Some(kind) = arguments.kind {
        builder = builder.kind(kind);
    }
    // What no pool can be made of is found before anything is timed.
    let kind = builder.clone().build()?.kind();

    let allocators = Allocator::of(kind, &selected.device.properties()?);
    let bar = progress_bar(works.len() * allocators.len());
    let mut rows = Vec::with_capacity(works.len() * allocators.len());
    for work in works {
        for &allocator in &allocators {
            bar.set_message(format!("{} of {}", work.name(), allocator.name()));
            rows.push(Row { allocator, work, outcome: measure(allocator, work, &selected, kind, &builder)? });
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if arguments.common.json {
        output::print_json(&to_json(&rows, &selected, kind))?;
    } else {
        output::print(&table::measured(&rows, &selected, kind)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// As many threads as the machine has cores for.
fn default_threads() -> Vec<usize> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    THREADS.into_iter().filter(|&threads| threads <= cores).collect()
}

/// Each row has a pool of its own, whose memory is back with the driver when the next one begins.
fn measure(
    allocator: Allocator,
    work: Work,
    selected: &Selected,
    kind: MemoryKind,
    builder: &PoolBuilder,
) -> Result<Result<Figures, String>, Failure> {
    let outcome = match allocator {
        Allocator::Driver => done(&Plain { device: &selected.device, kind }, work),
        Allocator::DriverAsync => done(&Ordered::new(&selected.device)?, work),
        Allocator::Pool => done(&builder.clone().build()?, work),
        Allocator::Host => done(&Host, work),
    };
    match outcome {
        Ok(figures) => Ok(Ok(figures)),
        Err(Refusal::Memory(reason)) => Ok(Err(reason)),
        Err(Refusal::Failed(failure)) => Err(failure),
    }
}

fn done<S: Subject>(subject: &S, work: Work) -> Result<Figures, Refusal> {
    match work {
        Work::Pair(size) => work::pair(subject, size),
        Work::Churn(threads) => work::churn(subject, threads),
    }
}

/// A bar on standard error, where that is a terminal.
fn progress_bar(rows: usize) -> ProgressBar {
    let bar = ProgressBar::new(rows as u64);
    match ProgressStyle::with_template("{bar:30} {pos}/{len} rows, {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn to_json(all: &[Row], selected: &Selected, kind: MemoryKind) -> Value {
    let mut rows: Vec<Value> = Vec::new();
    let mut skipped: Vec<Value> = Vec::new();
    for Row { allocator, work, outcome } in all {
        let mut row = Map::new();
        row.insert("allocator".to_owned(), allocator.name().into());
        row.insert("work".to_owned(), work.name().into());
        row.insert("size".to_owned(), work.size().into());
        row.insert("threads".to_owned(), work.threads().into());
        match outcome {
            Ok(figures) => {
                row.insert("alloc_ns".to_owned(), figures.alloc_ns.into());
                row.insert("free_ns".to_owned(), figures.free_ns.into());
                row.insert("pairs_per_second".to_owned(), figures.pairs_per_second.into());
                row.insert("modelled".to_owned(), figures.modelled.into());
                rows.push(row.into());
            }
            Err(reason) => {
                row.insert("reason".to_owned(), reason.as_str().into());
                skipped.push(row.into());
            }
        }
    }
    json!({ "device": selected.name, "kind": kind.to_string(), "rows": rows, "skipped": skipped })
}

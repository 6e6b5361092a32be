//! The benchmark's tables for people.

use super::work::{Figures, PAIRS, SLOTS};
use super::{Allocator, Row, Work};
use crate::Failure;
use crate::device::Selected;
use crate::format::{count, time};
use crate::table::{or_none, row, table};
use std::time::Duration;
use vrampool::driver::MemoryKind;
use vrampool::units::Bytes;

/// The functions that take and give back memory of a kind.
const fn functions(kind: MemoryKind) -> (&'static str, &'static str) {
    match kind {
        MemoryKind::Device => ("cuMemAlloc", "cuMemFree"),
        MemoryKind::Pinned => ("cuMemAllocHost", "cuMemFreeHost"),
        MemoryKind::Managed => ("cuMemAllocManaged", "cuMemFree"),
    }
}

/// The figures of every allocator at one work.
struct Line<'a> {
    driver: Option<&'a Figures>,
    pool: Option<&'a Figures>,
    host: Option<&'a Figures>,
}

impl<'a> Line<'a> {
    fn new(rows: &'a [Row]) -> Self {
        let of = |allocator| rows.iter().find(|row| row.allocator == allocator).and_then(|row| row.outcome.as_ref().ok());
        Self { driver: of(Allocator::Driver), pool: of(Allocator::Pool), host: of(Allocator::Host) }
    }

    /// How much more of something the first has than the second.
    fn ratio(more: Option<&Figures>, less: Option<&Figures>, of: impl Fn(&Figures) -> f64) -> String {
        let ratio = more.zip(less).map(|(more, less)| of(more) / of(less)).filter(|ratio| ratio.is_finite());
        or_none(ratio, |ratio| if ratio < 9.95 { format!("{ratio:.1}x") } else { format!("{}x", count(ratio.round() as u64)) })
    }
}

fn nanoseconds(figures: Option<&Figures>, of: impl Fn(&Figures) -> f64) -> String {
    or_none(figures, |figures| time(Duration::from_secs_f64(of(figures) / 1e9)))
}

fn rate(figures: Option<&Figures>) -> String {
    or_none(figures, |figures| count(figures.pairs_per_second.round() as u64))
}

pub(super) fn measured(rows: &[Row], selected: &Selected, kind: MemoryKind) -> Result<String, Failure> {
    let name = if selected.is_simulated() { "the simulated device" } else { &selected.name };
    let (allocates, frees) = functions(kind);
    let mut text = format!("{kind} memory of {name} ({})\n\n", selected.description()?);

    let mut pairs = table();
    let head = ["size", allocates, "vrampool", "ratio", frees, "vrampool", "ratio", "mimalloc: alloc", "free"];
    pairs.set_header(row(head));
    let mut churns = table();
    churns.set_header(row(["threads", "driver: pairs / s", "vrampool", "ratio", "mimalloc"]));
    // The rows of one work stand together.
    for group in rows.chunk_by(|a, b| a.work == b.work && a.allocator != Allocator::Host) {
        let line = Line::new(group);
        match group[0].work {
            Work::Pair(size) => pairs.add_row(row([
                Bytes(size).to_string(),
                nanoseconds(line.driver, |figures| figures.alloc_ns),
                nanoseconds(line.pool, |figures| figures.alloc_ns),
                Line::ratio(line.driver, line.pool, |figures| figures.alloc_ns),
                nanoseconds(line.driver, |figures| figures.free_ns),
                nanoseconds(line.pool, |figures| figures.free_ns),
                Line::ratio(line.driver, line.pool, |figures| figures.free_ns),
                nanoseconds(line.host, |figures| figures.alloc_ns),
                nanoseconds(line.host, |figures| figures.free_ns),
            ])),
            Work::Churn(threads) => churns.add_row(row([
                threads.to_string(),
                rate(line.driver),
                rate(line.pool),
                Line::ratio(line.pool, line.driver, |figures| figures.pairs_per_second),
                rate(line.host),
            ])),
        };
    }
    text += &format!(
        "pair: {PAIRS} allocations, then {PAIRS} frees, by one thread; the time of one, the median of many repetitions\n{pairs}\n\n\
         churn: each thread frees some of its {SLOTS} blocks of 256 B to 1 MiB and allocates others; of all threads together\n{churns}\n\n\
         The pool holds its memory from the driver already: its first allocations, which call the driver, are not in these\n\
         times. mimalloc, with its default options, serves memory of the host: the yardstick for\n\
         bookkeeping, though it gives free memory back to the kernel now and then, which weighs on its churn.\n"
    );
    if rows.iter().any(|row| row.outcome.as_ref().is_ok_and(|figures| figures.modelled)) {
        text += "The driver's times are modelled on calls measured on an H200, one call at a time whatever the threads; those of vrampool\n\
                 and mimalloc are measured on this machine.\n";
    }
    for Row { allocator, work, outcome } in rows {
        if let Err(reason) = outcome {
            let what = match work {
                Work::Pair(size) => format!("pairs of {}", Bytes(*size)),
                Work::Churn(threads) => format!("churn by {threads}"),
            };
            text += &format!("{}: no {what}: {reason}\n", allocator.name());
        }
    }
    Ok(text)
}

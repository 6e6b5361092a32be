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
    driver_async: Option<&'a Figures>,
    pool: Option<&'a Figures>,
    host: Option<&'a Figures>,
}

impl<'a> Line<'a> {
    fn new(rows: &'a [Row]) -> Self {
        let of = |allocator| rows.iter().find(|row| row.allocator == allocator).and_then(|row| row.outcome.as_ref().ok());
        Self {
            driver: of(Allocator::Driver),
            driver_async: of(Allocator::DriverAsync),
            pool: of(Allocator::Pool),
            host: of(Allocator::Host),
        }
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

    // The columns of the driver's stream-ordered allocator, where it has rows.
    let has_async = rows.iter().any(|row| row.allocator == Allocator::DriverAsync);
    let if_async = |cell: String| has_async.then_some(cell);
    let cells = |cells: Vec<Option<String>>| row(cells.into_iter().flatten());
    let head = |text: &str| Some(text.to_owned());
    let mut pairs = table();
    pairs.set_header(cells(vec![
        head("size"),
        head(allocates),
        if_async("cuMemAllocAsync".to_owned()),
        head("vrampool"),
        head("ratio"),
        head(frees),
        if_async("cuMemFreeAsync".to_owned()),
        head("vrampool"),
        head("ratio"),
        head("mimalloc: alloc"),
        head("free"),
    ]));
    let mut churns = table();
    churns.set_header(cells(vec![
        head("threads"),
        head("driver: pairs / s"),
        if_async("driver_async".to_owned()),
        head("vrampool"),
        head("ratio"),
        head("mimalloc"),
    ]));
    // The rows of one work stand together.
    for group in rows.chunk_by(|a, b| a.work == b.work && a.allocator != Allocator::Host) {
        let line = Line::new(group);
        match group[0].work {
            Work::Pair(size) => pairs.add_row(cells(vec![
                Some(Bytes(size).to_string()),
                Some(nanoseconds(line.driver, |figures| figures.alloc_ns)),
                if_async(nanoseconds(line.driver_async, |figures| figures.alloc_ns)),
                Some(nanoseconds(line.pool, |figures| figures.alloc_ns)),
                Some(Line::ratio(line.driver, line.pool, |figures| figures.alloc_ns)),
                Some(nanoseconds(line.driver, |figures| figures.free_ns)),
                if_async(nanoseconds(line.driver_async, |figures| figures.free_ns)),
                Some(nanoseconds(line.pool, |figures| figures.free_ns)),
                Some(Line::ratio(line.driver, line.pool, |figures| figures.free_ns)),
                Some(nanoseconds(line.host, |figures| figures.alloc_ns)),
                Some(nanoseconds(line.host, |figures| figures.free_ns)),
            ])),
            Work::Churn(threads) => churns.add_row(cells(vec![
                Some(threads.to_string()),
                Some(rate(line.driver)),
                if_async(rate(line.driver_async)),
                Some(rate(line.pool)),
                Some(Line::ratio(line.pool, line.driver, |figures| figures.pairs_per_second)),
                Some(rate(line.host)),
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
    if has_async {
        text += "cuMemAllocAsync and cuMemFreeAsync (driver_async) are called on one stream, and the driver keeps what is freed (release\n\
                 threshold). Nothing is synchronised in between. The ratios are to the plain functions.\n";
    }
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

//! Tables for people.

use crate::device::Selected;
use crate::format::{count, nanoseconds, time};
use crate::replay::{Replayed, short_name, without_a_pool};
use crate::{Failure, replay};
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};
use std::time::Duration;
use vrampool::units::Bytes;

const NONE: &str = "–";

fn table() -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
    table
}

/// A row whose first cell is text, and the others numbers.
fn row(cells: impl IntoIterator<Item = String>) -> Vec<Cell> {
    let align = |index| if index == 0 { CellAlignment::Left } else { CellAlignment::Right };
    cells.into_iter().enumerate().map(|(index, cell)| Cell::new(cell).set_alignment(align(index))).collect()
}

/// Names and values.
pub(crate) fn properties(rows: &[(&str, String)]) -> String {
    let mut table = table();
    for (name, value) in rows {
        table.add_row(row([(*name).to_owned(), value.clone()]));
    }
    format!("{table}\n")
}

/// What replays took: in full for one trace, a line each for several.
pub(crate) fn replayed(all: &[Replayed], selected: &Selected) -> Result<String, Failure> {
    let described = if selected.is_simulated() { "the simulated device" } else { &selected.name };
    let device = format!("{described} ({})", selected.description()?);
    Ok(match all {
        [one] => full(one, selected, &device),
        _ => summary(all, selected, &device),
    })
}

/// The figures of a replay as cells.
struct Figures {
    direct_calls: String,
    direct_time: String,
    cold_calls: String,
    warm_calls: String,
    cold_time: String,
    warm_time: String,
    cold_ns: String,
    warm_ns: String,
    held: String,
    ratio: String,
}

impl Figures {
    fn of(replayed: &Replayed, selected: &Selected) -> Self {
        let report = &replayed.report;
        let none = || NONE.to_owned();
        let optional = |value: Option<Duration>| value.map_or_else(none, time);
        // A real device's own allocator would have to be measured.
        let direct = selected.is_simulated().then(|| without_a_pool(&replayed.trace));
        Self {
            direct_calls: direct.as_ref().map_or_else(none, |direct| count(direct.calls)),
            direct_time: optional(direct.and_then(|direct: replay::Direct| direct.time)),
            cold_calls: count(report.driver_calls_cold.total()),
            warm_calls: report.driver_calls_warm.as_ref().map_or_else(none, |calls| count(calls.total())),
            cold_time: time(report.driver_time_cold),
            warm_time: optional(report.driver_time_warm),
            cold_ns: nanoseconds(report.cold_ns_per_event),
            warm_ns: report.warm_ns_per_event.map_or_else(none, nanoseconds),
            held: Bytes(report.peak_reserved_bytes).to_string(),
            ratio: replayed.reserved_over_live().map_or_else(none, |ratio| format!("{ratio:.3}")),
        }
    }
}

fn full(replayed: &Replayed, selected: &Selected, device: &str) -> String {
    let Replayed { trace, report } = replayed;
    let figures = Figures::of(replayed, selected);
    let live = Bytes(trace.peak_live_bytes()).to_string();
    let mut text = format!(
        "{}: {} events ({} allocations) on {device}\n\n",
        short_name(trace.name()),
        count(trace.events().len() as u64),
        count(trace.allocations() as u64)
    );

    let mut memory = table();
    memory.set_header(row(["memory", "at its peak", "of live"].map(str::to_owned)));
    memory.add_row(row(["live: allocated and not yet freed, as asked for".to_owned(), live, "1.000".to_owned()]));
    memory.add_row(row(["held: what the pool had taken from the driver".to_owned(), figures.held, figures.ratio]));
    text += &format!("{memory}\n\n");

    let modelled = if report.modelled { " (modelled)" } else { "" };
    let mut driver = table();
    driver.set_header(row(["cost of all events", "without a pool", "pool, first pass", "pool, last pass"].map(str::to_owned)));
    driver.add_row(row(["driver calls".to_owned(), figures.direct_calls, figures.cold_calls, figures.warm_calls]));
    driver.add_row(row([format!("time in driver calls{modelled}"), figures.direct_time, figures.cold_time, figures.warm_time]));
    driver.add_row(row(["pool's own time per event".to_owned(), NONE.to_owned(), figures.cold_ns, figures.warm_ns]));
    text += &format!("{driver}\n\n");

    text += "Without a pool, each allocation and each free is a call of cuMemAlloc or cuMemFree. In its first pass the pool\n\
             takes memory from the driver as it is needed; later passes find it there.\n";
    if report.modelled {
        text += "Times of the driver are modelled on calls measured on an H200; the pool's own time is measured here.\n";
    }
    text += &failures(replayed);
    text
}

fn summary(all: &[Replayed], selected: &Selected, device: &str) -> String {
    let mut text = format!("{} traces on {device}\n\n", all.len());
    let mut table = table();
    let header = ["trace", "events", "peak live", "peak held", "held / live", "driver calls", "driver time", "ns per event"];
    table.set_header(row(header.map(str::to_owned)));
    let mut failed = String::new();
    for replayed in all {
        let figures = Figures::of(replayed, selected);
        table.add_row(row([
            short_name(replayed.trace.name()),
            count(replayed.trace.events().len() as u64),
            Bytes(replayed.trace.peak_live_bytes()).to_string(),
            figures.held,
            figures.ratio,
            format!("{} → {} → {}", figures.direct_calls, figures.cold_calls, figures.warm_calls),
            format!("{} → {} → {}", figures.direct_time, figures.cold_time, figures.warm_time),
            format!("{} → {}", figures.cold_ns, figures.warm_ns),
        ]));
        failed += &failures(replayed);
    }
    text += &format!("{table}\n\n");
    text += "live: bytes allocated and not yet freed, as asked for. held: what the pool had taken from the driver.\n\
             driver calls and their time: without a pool (cuMemAlloc and cuMemFree each time) → the pool's first pass → its last.\n\
             ns per event: the pool's own time, first pass → fastest later one.\n";
    if all.iter().any(|replayed| replayed.report.modelled) {
        text += "Times of the driver are modelled on calls measured on an H200; the pool's own time is measured here.\n";
    }
    text + &failed
}

fn failures(replayed: &Replayed) -> String {
    let name = short_name(replayed.trace.name());
    let mut text = String::new();
    if replayed.report.failed > 0 {
        text += &format!("{name}: {} requests FAILED; the figures are those of the rest.\n", count(replayed.report.failed));
    }
    if replayed.trace.recorded_failures() > 0 {
        let (recorded, repeated) = (replayed.trace.recorded_failures() as u64, replayed.report.recorded_failures_repeated);
        text += &format!("{name}: {} allocations failed when it was recorded; {} of them failed here.\n", count(recorded), count(repeated));
    }
    text
}

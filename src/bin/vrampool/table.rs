//! Tables for people.

use crate::Failure;
use crate::device::Selected;
use crate::format::{count, nanoseconds, time};
use crate::replay::{Direct, Replayed, short_name, without_a_pool};
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};
use std::time::Duration;
use vrampool::driver::CallCounts;
use vrampool::units::Bytes;

/// Stands where there is no figure.
const NONE: &str = "–";

pub(crate) const MODELLED: &str =
    "Driver times are modelled on calls measured on an H200; the pool's own time is measured on this machine.\n";

pub(crate) fn table() -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
    table
}

/// A row whose first cell is text, and the others numbers.
pub(crate) fn row<T: ToString>(cells: impl IntoIterator<Item = T>) -> Vec<Cell> {
    let align = |index| if index == 0 { CellAlignment::Left } else { CellAlignment::Right };
    cells.into_iter().enumerate().map(|(index, cell)| Cell::new(cell).set_alignment(align(index))).collect()
}

pub(crate) fn or_none<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| NONE.to_owned(), show)
}

/// Names and values.
pub(crate) fn properties(rows: &[(&str, String)]) -> String {
    let mut table = table();
    for (name, value) in rows {
        table.add_row(row([name, value.as_str()]));
    }
    format!("{table}\n")
}

/// What replays took: in full for one trace, a line each for several.
pub(crate) fn replayed(all: &[Replayed], selected: &Selected) -> Result<String, Failure> {
    let name = if selected.is_simulated() { "the simulated device" } else { &selected.name };
    let device = format!("{name} ({})", selected.description()?);
    let mut text = match all {
        [one] => full(one, selected, &device),
        _ => summary(all, selected, &device),
    };
    if selected.is_simulated() {
        text += MODELLED;
    }
    for replayed in all {
        text += &failures(replayed);
    }
    Ok(text)
}

/// What the trace costs without a pool, where that is known without trying: on the simulated device.
fn direct(replayed: &Replayed, selected: &Selected) -> Option<Direct> {
    selected.is_simulated().then(|| without_a_pool(&replayed.trace))
}

fn full(replayed: &Replayed, selected: &Selected, device: &str) -> String {
    let Replayed { trace, report } = replayed;
    let direct = direct(replayed, selected);
    let mut text = format!(
        "{} on {device}: {} events, {} of them allocations\n\n",
        short_name(trace.name()),
        count(trace.events().len() as u64),
        count(trace.allocations() as u64)
    );

    let mut memory = table();
    memory.add_row(row(["peak live: allocated and not yet freed, as asked for", &Bytes(trace.peak_live_bytes()).to_string()]));
    memory.add_row(row(["peak reserved: held by the pool from the driver", &Bytes(report.peak_reserved_bytes).to_string()]));
    memory.add_row(row(["reserved / live", &or_none(replayed.reserved_over_live(), |ratio| format!("{ratio:.3}"))]));
    text += &format!("{memory}\n\n");

    let mut cost = table();
    cost.set_header(row(["all events together", "without a pool", "pool, first pass (cold)", "pool, last pass (warm)"]));
    let columns = [direct.as_ref().map(|direct| &direct.calls), Some(&report.driver_calls_cold), report.driver_calls_warm.as_ref()];
    let totals = columns.map(|calls| or_none(calls, |calls| count(calls.total())));
    cost.add_row(row(["driver calls".to_owned()].into_iter().chain(totals)));
    for name in names(&columns) {
        let of = |calls: &CallCounts| calls.iter().find(|&(other, _)| other == name).map_or(0, |(_, calls)| calls);
        let cells = columns.map(|calls| or_none(calls.map(of).filter(|&calls| calls > 0), count));
        cost.add_row(row([format!("  {name}")].into_iter().chain(cells)));
    }
    cost.add_row(row([
        "time in driver calls".to_owned(),
        or_none(direct.and_then(|direct| direct.time), time),
        time(report.driver_time_cold),
        or_none(report.driver_time_warm, time),
    ]));
    cost.add_row(row([
        "pool's own time per event".to_owned(),
        NONE.to_owned(),
        nanoseconds(report.cold_ns_per_event),
        or_none(report.warm_ns_per_event, nanoseconds),
    ]));
    text += &format!("{cost}\n\n");
    text + "Without a pool each allocation is a call of cuMemAlloc and each free one of cuMemFree. In its first pass the pool takes\n\
            memory from the driver as the events come; in later passes it has it. Its own warm time is that of the fastest pass.\n"
}

/// The functions that were called, each once, in the order in which they first come up.
fn names(columns: &[Option<&CallCounts>]) -> Vec<&'static str> {
    let mut names = Vec::new();
    for (name, _) in columns.iter().copied().flatten().flat_map(CallCounts::iter) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn summary(all: &[Replayed], selected: &Selected, device: &str) -> String {
    let mut table = table();
    table.set_header(row([
        "trace",
        "events",
        "peak live",
        "peak reserved",
        "reserved / live",
        "driver calls",
        "time in driver calls",
        "own time per event",
    ]));
    for replayed in all {
        let Replayed { trace, report } = replayed;
        let direct = direct(replayed, selected);
        let calls = |calls: Option<&CallCounts>| or_none(calls, |calls| count(calls.total()));
        let duration = |value: Option<Duration>| or_none(value, time);
        table.add_row(row([
            short_name(trace.name()),
            count(trace.events().len() as u64),
            Bytes(trace.peak_live_bytes()).to_string(),
            Bytes(report.peak_reserved_bytes).to_string(),
            or_none(replayed.reserved_over_live(), |ratio| format!("{ratio:.3}")),
            format!(
                "{} → {} → {}",
                calls(direct.as_ref().map(|direct| &direct.calls)),
                calls(Some(&report.driver_calls_cold)),
                calls(report.driver_calls_warm.as_ref())
            ),
            format!(
                "{} → {} → {}",
                duration(direct.and_then(|direct| direct.time)),
                duration(Some(report.driver_time_cold)),
                duration(report.driver_time_warm)
            ),
            format!("{} → {}", nanoseconds(report.cold_ns_per_event), or_none(report.warm_ns_per_event, nanoseconds)),
        ]));
    }
    format!(
        "{} traces on {device}\n\n{table}\n\n\
         peak live: allocated and not yet freed, as asked for. peak reserved: held by the pool from the driver.\n\
         driver calls and their time: without a pool (cuMemAlloc, cuMemFree) → in the pool's first pass → in its last.\n\
         own time per event: the pool's, in the first pass → in the fastest later one.\n",
        all.len()
    )
}

fn failures(replayed: &Replayed) -> String {
    let name = short_name(replayed.trace.name());
    let mut text = String::new();
    if replayed.report.failed > 0 {
        text += &format!("{name}: FAILED requests: {}; the figures are those of the rest.\n", count(replayed.report.failed));
    }
    if let Some(verification) = &replayed.report.verification {
        let (blocks, bytes) = (count(verification.blocks), Bytes(verification.bytes));
        text += &match verification.mismatches {
            0 => format!("{name}: verified: all {blocks} blocks ({bytes}) were as the device had filled them.\n"),
            wrong => format!("{name}: MISMATCHES: {} of {blocks} blocks ({bytes}) were not as filled.\n", count(wrong)),
        };
    }
    if replayed.trace.recorded_failures() > 0 {
        let (recorded, repeated) = (replayed.trace.recorded_failures() as u64, replayed.report.recorded_failures_repeated);
        text += &format!("{name}: allocations that failed when the trace was recorded: {}; here: {}.\n", count(recorded), count(repeated));
    }
    text
}

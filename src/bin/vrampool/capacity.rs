//! `vrampool min-capacity`: how little memory a pool can serve a trace with.

use crate::args::MinCapacityArguments;
use crate::device::{Selected, select};
use crate::format::{count, nanoseconds, time};
use crate::replay::{calls_to_json, failure_to_json, milliseconds, name_failure, progress_bar, read, short_name, tenths};
use crate::table::{MODELLED, or_none, row, table};
use crate::{Failure, output};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;
use vrampool::Pool;
use vrampool::trace::{self, Capacity, Fit, Trace, min_capacity};
use vrampool::units::Bytes;

/// A trace and its smallest capacity, or the request that fails whatever the capacity.
struct Searched {
    trace: Trace,
    outcome: Result<Capacity, trace::Failure>,
}

impl Searched {
    fn capacity(&self) -> Option<&Capacity> {
        self.outcome.as_ref().ok()
    }

    fn capacity_over_live(&self) -> Option<f64> {
        let live = self.trace.peak_live_bytes();
        self.capacity().filter(|_| live > 0).map(|capacity| capacity.bytes as f64 / live as f64)
    }

    fn recorded(&self) -> Duration {
        Duration::from_nanos(self.trace.duration_ns())
    }
}

pub(crate) fn run(arguments: &MinCapacityArguments) -> Result<ExitCode, Failure> {
    let traces = read(&arguments.traces)?;
    let selected = select(arguments.common.device)?;
    let builder = Pool::builder().configure_from_env()?;
    let mut all = Vec::with_capacity(traces.len());
    for trace in traces {
        let bar = progress_bar(&trace);
        let fit = min_capacity(&trace, &selected.device, builder.clone(), &mut |trial| {
            bar.set_message(format!("trial {} at {}", trial.number, Bytes(trial.capacity_bytes)));
            bar.set_position(trial.events as u64);
        })?;
        bar.finish_and_clear();
        let outcome = match fit {
            Fit::Smallest(capacity) => Ok(capacity),
            Fit::Nowhere(failure) => Err(failure),
            other => return Err(Failure::Work(format!("{}: {other:?}", trace.name()))),
        };
        all.push(Searched { trace, outcome });
    }
    if arguments.common.json {
        output::print_traces(all.iter().map(|searched| to_json(searched, &selected)).collect())?;
    } else {
        output::print(&text(&all, &selected)?)?;
    }
    let mut status = ExitCode::SUCCESS;
    for Searched { trace, outcome } in &all {
        if let Err(failure) = outcome {
            output::complain(&format!("with the whole device, {}", name_failure(trace, failure)));
            status = ExitCode::from(1);
        }
    }
    Ok(status)
}

fn to_json(searched: &Searched, selected: &Selected) -> Value {
    let capacity = searched.capacity();
    json!({
        "trace": searched.trace.name(),
        "device": selected.name,
        "peak_live_bytes": searched.trace.peak_live_bytes(),
        "capacity_bytes": capacity.map(|capacity| capacity.bytes),
        "capacity_over_live": searched.capacity_over_live(),
        "ns_per_event": capacity.map(|capacity| tenths(capacity.ns_per_event)),
        "first_failure_above": capacity.and_then(|capacity| capacity.first_failure_above),
        "driver_ms": capacity.map(|capacity| milliseconds(capacity.driver_time)),
        "recorded_ms": milliseconds(searched.recorded()),
        "driver_calls": capacity.map(|capacity| calls_to_json(&capacity.driver_calls)),
        "trials": capacity.map(|capacity| capacity.trials),
        "modelled": capacity.map(|capacity| capacity.modelled),
        "first_failure": searched.outcome.as_ref().err().map(failure_to_json),
    })
}

fn text(all: &[Searched], selected: &Selected) -> Result<String, Failure> {
    let mut table = table();
    table.set_header(row([
        "trace",
        "peak live",
        "smallest capacity",
        "capacity / live",
        "fails above at",
        "driver calls",
        "time in driver calls",
        "recorded time",
        "own time per event",
    ]));
    for searched in all {
        let capacity = searched.capacity();
        table.add_row(row([
            short_name(searched.trace.name()),
            Bytes(searched.trace.peak_live_bytes()).to_string(),
            or_none(capacity, |capacity| Bytes(capacity.bytes).to_string()),
            or_none(searched.capacity_over_live(), |ratio| format!("{ratio:.4}")),
            or_none(capacity.and_then(|capacity| capacity.first_failure_above), |bytes| Bytes(bytes).to_string()),
            or_none(capacity, |capacity| count(capacity.driver_calls.total())),
            or_none(capacity, |capacity| time(capacity.driver_time)),
            time(searched.recorded()),
            or_none(capacity, |capacity| nanoseconds(capacity.ns_per_event)),
        ]));
    }
    let name = if selected.is_simulated() { "the simulated device" } else { &selected.name };
    let mut text = format!(
        "smallest capacities on {name} ({})\n\n{table}\n\n\
         With this capacity, and with eight larger ones up to 1.05 times it, one pass over the whole trace on a fresh pool completes.\n\
         Calls and times are those of the pass with just this capacity; the recorded time is the program's own.\n",
        selected.description()?
    );
    if selected.is_simulated() {
        text += MODELLED;
    }
    Ok(text)
}

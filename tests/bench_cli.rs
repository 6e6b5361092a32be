//! `vrampool bench` as a user meets it: what it measures, and what it refuses. How fast anything is, no test says.

use serde_json::Value;
use std::process::{Command, Output, Stdio};

fn vrampool() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vrampool"));
    command.stdin(Stdio::null());
    // What the tests' own environment says of vrampool is not to matter.
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("VRAMPOOL_")) {
        command.env_remove(name);
    }
    command.args(["bench", "--device", "sim"]);
    command
}

fn bench(arguments: &[&str]) -> Output {
    vrampool().args(arguments).output().expect("the program runs")
}

/// The output of a run that went well.
#[track_caller]
fn stdout(output: &Output) -> &str {
    let text = |bytes| std::str::from_utf8(bytes).expect("text");
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
    text(&output.stdout)
}

#[track_caller]
fn json(output: &Output) -> Value {
    serde_json::from_str(stdout(output)).expect("JSON")
}

fn array<'a>(report: &'a Value, name: &str) -> &'a [Value] {
    report[name].as_array().expect("an array")
}

fn fields(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

/// Allocator, work, size and threads of a row, as text.
fn subject(row: &Value) -> String {
    format!("{} {} {} {}", row["allocator"].as_str().expect("text"), row["work"].as_str().expect("text"), row["size"], row["threads"])
}

fn subjects(rows: &[Value]) -> Vec<String> {
    rows.iter().map(subject).collect()
}

#[test]
fn every_allocator_has_a_row_for_every_work() {
    let report = json(&bench(&["--sizes", "256,64KiB", "--threads", "1,2", "--json"]));
    assert_eq!(fields(&report), ["device", "kind", "rows", "skipped"]);
    assert_eq!((&report["device"], &report["kind"]), (&Value::from("sim"), &Value::from("device")));
    assert_eq!(
        subjects(array(&report, "rows")),
        [
            "driver pair 256 1",
            "driver_async pair 256 1",
            "vrampool pair 256 1",
            "mimalloc pair 256 1",
            "driver pair 65536 1",
            "driver_async pair 65536 1",
            "vrampool pair 65536 1",
            "mimalloc pair 65536 1",
            "driver churn null 1",
            "driver_async churn null 1",
            "vrampool churn null 1",
            "mimalloc churn null 1",
            "driver churn null 2",
            "driver_async churn null 2",
            "vrampool churn null 2",
            "mimalloc churn null 2",
        ]
    );
    for row in array(&report, "rows") {
        assert_eq!(fields(row), ["allocator", "work", "size", "threads", "alloc_ns", "free_ns", "pairs_per_second", "modelled"]);
        for figure in ["alloc_ns", "free_ns", "pairs_per_second"] {
            assert!(row[figure].as_f64().expect("a number") > 0.0, "{figure} of {}", subject(row));
        }
        let is_the_drivers = row["allocator"].as_str().expect("text").starts_with("driver");
        assert_eq!(row["modelled"], is_the_drivers, "{}", subject(row));
    }
    assert!(array(&report, "skipped").is_empty());
}

#[test]
fn modelled_rows_are_the_models_own_figures() {
    let figures = |kind: &str, size: &str| {
        let report = json(&bench(&["--sizes", size, "--threads", "1", "--kind", kind, "--json"]));
        let row = &array(&report, "rows")[0];
        assert_eq!((&report["kind"], &row["allocator"]), (&Value::from(kind), &Value::from("driver")));
        (row["alloc_ns"].as_f64().expect("a number"), row["free_ns"].as_f64().expect("a number"))
    };
    assert_eq!(figures("device", "1MiB"), (17_900.0, 15_700.0));
    assert_eq!(figures("managed", "1MiB"), (17_900.0, 15_700.0));
    assert_eq!(figures("pinned", "2MiB"), (1_000_000.0, 400_000.0));
}

#[test]
fn the_drivers_stream_ordered_allocator_costs_the_same_whatever_the_size() {
    let report = json(&bench(&["--sizes", "256,1MiB,256MiB", "--threads", "1", "--json"]));
    let rows: Vec<&Value> = array(&report, "rows").iter().filter(|row| row["allocator"] == "driver_async").collect();
    assert_eq!(rows.len(), 4);
    for row in rows {
        assert_eq!((row["alloc_ns"].as_f64(), row["free_ns"].as_f64()), (Some(750.0), Some(480.0)), "{}", subject(row));
    }
}

#[test]
fn memory_of_other_kinds_has_no_rows_of_the_stream_ordered_allocator() {
    for kind in ["pinned", "managed"] {
        let report = json(&bench(&["--sizes", "256", "--threads", "1", "--kind", kind, "--json"]));
        let allocators: Vec<&str> = array(&report, "rows").iter().map(|row| row["allocator"].as_str().expect("text")).collect();
        assert_eq!(allocators, ["driver", "vrampool", "mimalloc", "driver", "vrampool", "mimalloc"], "{kind}");
    }
}

#[test]
fn one_modelled_rate_stands_for_any_number_of_threads() {
    let report = json(&bench(&["--sizes", "256", "--threads", "1,3", "--json"]));
    let rates: Vec<f64> = array(&report, "rows")
        .iter()
        .filter(|row| row["allocator"] == "driver" && row["work"] == "churn")
        .map(|row| row["pairs_per_second"].as_f64().expect("a number"))
        .collect();
    assert_eq!(rates.len(), 2);
    // The threads draw different sizes, and the model serves one call at a time.
    assert!((0.8..1.25).contains(&(rates[1] / rates[0])), "{rates:?}");
}

#[test]
fn memory_that_cannot_be_had_is_a_row_left_out_with_the_reason() {
    // 64 of these are more than the device has, though one is not.
    let report = json(&bench(&["--sizes", "256,4GiB", "--threads", "1", "--json"]));
    let skipped = array(&report, "skipped");
    let expected = ["driver pair 4294967296 1", "driver_async pair 4294967296 1", "vrampool pair 4294967296 1"].map(str::to_owned);
    assert!(subjects(skipped).starts_with(&expected));
    for row in skipped {
        assert_eq!(fields(row), ["allocator", "work", "size", "threads", "reason"]);
        assert!(!row["reason"].as_str().expect("text").is_empty());
    }
    // The rows after it are there: nothing of it was left behind.
    assert!(subjects(array(&report, "rows")).ends_with(&[
        "driver churn null 1".to_owned(),
        "driver_async churn null 1".to_owned(),
        "vrampool churn null 1".to_owned(),
        "mimalloc churn null 1".to_owned()
    ]));
    let huge = json(&bench(&["--sizes", "18446744073709551615", "--threads", "1", "--json"]));
    assert_eq!((array(&huge, "skipped").len(), array(&huge, "rows").len()), (4, 4));
}

#[test]
fn the_options_of_the_environment_are_the_pools() {
    let run = |arguments: &[&str]| vrampool().env("VRAMPOOL_CONFIG", "kind=pinned,maximum=4MiB").args(arguments).output().expect("it runs");
    let arguments = ["--sizes", "1MiB", "--threads", "1", "--json"];
    let report = json(&run(&arguments));
    assert_eq!(report["kind"], "pinned");
    let left_out = subjects(array(&report, "skipped"));
    assert_eq!(left_out, ["vrampool pair 1048576 1", "vrampool churn null 1"], "4 MiB are too few for a pool, and no matter to the others");
    assert_eq!(json(&run(&[&arguments[..], &["--kind", "device"]].concat()))["kind"], "device", "the command line wins");
}

#[test]
fn the_table_says_what_is_modelled_and_what_is_left_out() {
    let output = bench(&["--sizes", "256,4GiB", "--threads", "1", "--kind", "device"]);
    let text = stdout(&output);
    for part in [
        "device memory of the simulated device (Simulated H200, 140 GiB)",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemAllocAsync",
        "cuMemFreeAsync",
        "256 B",
        "ratio",
        "modelled",
        "driver: no pairs of 4 GiB: ",
        "vrampool: no pairs of 4 GiB: ",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let pinned = bench(&["--sizes", "256", "--threads", "1", "--kind", "pinned"]);
    assert!(stdout(&pinned).contains("cuMemAllocHost") && stdout(&pinned).contains("cuMemFreeHost"));
    assert!(!stdout(&pinned).contains("Async"));
}

#[test]
fn unusable_lists_are_refused() {
    for (arguments, why) in [
        (["--sizes", "0"], "0 bytes"),
        (["--sizes", "256,"], "not a number"),
        (["--sizes", "4MB"], "unknown unit"),
        (["--sizes", "256,-1"], "unknown unit"),
        (["--threads", "0"], "number of threads"),
        (["--threads", "1,,2"], "number of threads"),
        (["--threads", "1025"], "number of threads"),
        (["--threads", "many"], "number of threads"),
        (["--kind", "host"], "not device, pinned or managed"),
        (["--repeat", "3"], "--repeat"),
    ] {
        let output = bench(&arguments);
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(2), &b""[..]), "{arguments:?}");
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.contains(why), "{arguments:?}: {message} does not say {why}");
    }
}

#[test]
fn the_drivers_costs_are_measured_on_the_simulated_device() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_vrampool-driver-costs"))
            .args(["--device", "sim", "--repeats", "3"])
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let tables = run(&[]);
    for row in ["move 64 MiB | idle", "move 2 MiB | busy", "launch beside moves | busy", "cuMemAlloc and cuMemFree | idle"] {
        assert!(tables.contains(row), "{row}: {tables}");
    }
    let report: Value = serde_json::from_str(&run(&["--json"])).unwrap();
    assert_eq!(report["modelled"], true);
    let calls = report["calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2 * 6 * 6 + 1);
    assert!(
        calls
            .iter()
            .all(|row| row["samples"] == 3 && row["p50_us"].as_f64().unwrap() > 0.0 && row["p50_us"].as_f64() <= row["max_us"].as_f64())
    );
    assert_eq!(report["neighbours"].as_array().unwrap().len(), 2 * 4 * 3);
    assert!(report["many"]["handles"].as_u64().unwrap() > 70_000, "{}", report["many"]);
    assert_eq!(report["many"]["refused_with"], "CUDA_ERROR_OUT_OF_MEMORY (2)");
}

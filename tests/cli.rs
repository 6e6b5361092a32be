//! The program as a user meets it: arguments, outputs, exit statuses.

use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";
const SIMULATED: &str = "vrampool: no CUDA device to be had: using the simulated device (Simulated H200, 140 GiB)\n";

fn vrampool() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vrampool"));
    command.stdin(Stdio::null());
    // What the tests' own environment says of vrampool is not to matter.
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("VRAMPOOL_")) {
        command.env_remove(name);
    }
    command
}

fn run(arguments: &[&str]) -> Output {
    vrampool().args(arguments).output().expect("the program runs")
}

fn run_with_input(arguments: &[&str], input: &[u8]) -> Output {
    let mut child =
        vrampool().args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program runs");
    // A program that refuses its arguments does not read.
    let _ = child.stdin.take().expect("a pipe").write_all(input);
    child.wait_with_output().expect("the program ends")
}

fn data(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/traces").join(name).display().to_string()
}

/// A file of this test run's own.
fn temporary(name: &str, contents: &[u8]) -> String {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, contents).expect("the folder is there");
    path.display().to_string()
}

fn status(output: &Output) -> i32 {
    output.status.code().expect("no signal")
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("text")
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("text")
}

#[track_caller]
fn json(output: &Output) -> Value {
    serde_json::from_str(stdout(output)).unwrap_or_else(|error| panic!("{error}\n{}{}", stdout(output), stderr(output)))
}

/// Checks that arguments or a file are refused, with a message that says why.
#[track_caller]
fn refused(output: &Output, why: &str) {
    assert_eq!(status(output), 2, "{}", stderr(output));
    assert_eq!(stdout(output), "");
    assert!(stderr(output).contains(why), "{} does not say {why}", stderr(output));
}

#[test]
fn a_replay_prints_a_table_and_says_that_the_device_is_simulated() {
    let output = run(&["replay", &data("gpt2_train.csv.gz")]);
    assert_eq!((status(&output), stderr(&output)), (0, SIMULATED));
    let text = stdout(&output);
    for part in
        ["gpt2_train on the simulated device", "18,031 events", "9,017 of them allocations", "10.67 GiB", "without a pool", "cuMemCreate"]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn a_replay_as_json_has_every_field() {
    let path = data("gpt2_train.csv.gz");
    let output = run(&["replay", &path, "--json", "--repeat", "3", "--device", "sim"]);
    assert_eq!((status(&output), stderr(&output)), (0, ""), "a device that was asked for is not announced");
    let report = json(&output);
    let fields: Vec<_> = report.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!(
        fields,
        [
            "trace",
            "device",
            "events",
            "allocations",
            "peak_live_bytes",
            "peak_reserved_bytes",
            "reserved_over_live",
            "cold_ns_per_event",
            "warm_ns_per_event",
            "driver_calls_cold",
            "driver_calls_warm",
            "driver_ms_cold",
            "driver_ms_warm",
            "failed",
            "first_failure",
            "recorded_failures",
            "recorded_failures_repeated",
            "passes",
            "modelled",
        ]
    );
    assert_eq!((&report["trace"], &report["device"]), (&Value::from(path), &Value::from("sim")));
    assert_eq!((report["events"].as_u64(), report["allocations"].as_u64()), (Some(18_031), Some(9_017)));
    let (live, reserved) = (report["peak_live_bytes"].as_u64().expect("bytes"), report["peak_reserved_bytes"].as_u64().expect("bytes"));
    assert_eq!(live, 11_453_443_640);
    assert_eq!(report["reserved_over_live"].as_f64(), Some(reserved as f64 / live as f64));
    for time in ["cold_ns_per_event", "warm_ns_per_event", "driver_ms_cold"] {
        assert!(report[time].as_f64().expect("a number") > 0.0, "{time}");
    }
    assert!(report["driver_ms_warm"].is_f64());
    for calls in ["driver_calls_cold", "driver_calls_warm"] {
        for (name, count) in report[calls].as_object().expect("an object") {
            assert!((name.starts_with("cu") || name == "sync") && count.is_u64(), "{name}: {count}");
        }
    }
    assert!(report["driver_calls_cold"]["cuMemCreate"].as_u64() > Some(0));
    assert_eq!((&report["failed"], &report["first_failure"], &report["passes"]), (&Value::from(0), &Value::Null, &Value::from(3)));
}

#[test]
fn a_replay_is_verified() {
    let path = data("small_model.csv.gz");
    let arguments = ["replay", &path, "--verify", "--device", "sim", "--repeat", "1"];
    let output = run(&[&arguments[..], &["--json"]].concat());
    assert_eq!((status(&output), stderr(&output)), (0, ""));
    let report = json(&output);
    let fields: Vec<_> = report.as_object().expect("an object").keys().map(String::as_str).skip(18).collect();
    assert_eq!(fields, ["modelled", "verified_blocks", "verified_bytes", "mismatches", "first_mismatch"]);
    assert_eq!((&report["mismatches"], &report["first_mismatch"]), (&Value::from(0), &Value::Null));
    assert_eq!(report["verified_blocks"], report["allocations"]);
    let plain = json(&run(&["replay", &path, "--device", "sim", "--repeat", "1", "--json"]));
    assert_eq!(plain.get("mismatches"), None);
    for figure in ["peak_reserved_bytes", "driver_calls_cold"] {
        assert_eq!(report[figure], plain[figure], "{figure} is the pool's own");
    }

    let log = format!("{HEADER}1,0,allocate,1,4097,0\n1,1,allocate,2,3,0\n1,2,free,1,4097,0\n");
    let output = run_with_input(&["replay", "-", "--verify", "--device", "sim", "--repeat", "1"], log.as_bytes());
    assert_eq!(status(&output), 0);
    assert!(stdout(&output).contains("-: verified: all 2 blocks (4 KiB) were as the device had filled them."), "{}", stdout(&output));
}

#[test]
fn what_the_host_cannot_hold_is_not_verified_on_the_simulated_device() {
    let log = format!("{HEADER}1,0,allocate,1,70368744177664,0\n");
    refused(&run_with_input(&["replay", "-", "--verify", "--device", "sim"], log.as_bytes()), "-: --verify on the simulated device keeps");
}

#[test]
fn the_smallest_capacity_as_json_has_every_field() {
    let path = data("prefetch_streams.csv.gz");
    let output = run(&["min-capacity", &path, "--json", "--device", "sim"]);
    assert_eq!((status(&output), stderr(&output)), (0, ""));
    let report = json(&output);
    let fields: Vec<_> = report.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!(
        fields,
        [
            "trace",
            "device",
            "peak_live_bytes",
            "capacity_bytes",
            "capacity_over_live",
            "ns_per_event",
            "first_failure_above",
            "driver_ms",
            "recorded_ms",
            "driver_calls",
            "trials",
            "modelled",
            "first_failure",
        ]
    );
    assert_eq!((&report["trace"], &report["device"]), (&Value::from(path.as_str()), &Value::from("sim")));
    let (live, capacity) = (report["peak_live_bytes"].as_u64().expect("bytes"), report["capacity_bytes"].as_u64().expect("bytes"));
    assert!(capacity >= live && capacity.is_multiple_of(2 << 20));
    assert_eq!(report["capacity_over_live"].as_f64(), Some(capacity as f64 / live as f64));
    assert!(report["first_failure_above"].is_null() || report["first_failure_above"].as_u64() > Some(capacity));
    for time in ["ns_per_event", "driver_ms", "recorded_ms"] {
        assert!(report[time].as_f64() > Some(0.0), "{time}");
    }
    assert!(report["driver_calls"]["cuMemCreate"].as_u64() > Some(0));
    assert_eq!(report["first_failure"], Value::Null);

    let replay = |bytes: u64| run(&["replay", &path, "--device", "sim", "--repeat", "1", "--json", "--capacity", &bytes.to_string()]);
    let at = replay(capacity);
    assert_eq!((status(&at), &json(&at)["driver_calls_cold"]), (0, &report["driver_calls"]), "the pass with just this capacity");
}

#[test]
fn the_smallest_capacities_of_several_traces() {
    let paths = [data("prefetch_streams.csv.gz"), data("rmm.csv")];
    let report = json(&run(&["min-capacity", &paths[0], &paths[1], "--json", "--device", "sim"]));
    assert_eq!(report.as_object().expect("an object").len(), 1);
    let names: Vec<_> =
        report["traces"].as_array().expect("an array").iter().map(|trace| trace["trace"].as_str().expect("a name")).collect();
    assert_eq!(names, paths);
    let table = run(&["min-capacity", &paths[0], &paths[1], "--device", "sim"]);
    assert_eq!((status(&table), stderr(&table)), (0, ""));
    for part in ["smallest capacities on the simulated device", "prefetch_streams", "927.08 MiB", "rmm ", "capacity / live", "6.41 s"] {
        assert!(stdout(&table).contains(part), "{part} is not in\n{}", stdout(&table));
    }
}

#[test]
fn the_smallest_capacity_is_the_environments_pools_but_for_its_maximum() {
    let path = temporary("small.csv", format!("{HEADER}1,0.5,allocate,0x100,3145728,0\n").as_bytes());
    let with = |config: &str| {
        vrampool()
            .env("VRAMPOOL_CONFIG", config)
            .args(["min-capacity", &path, "--json", "--device", "sim"])
            .output()
            .expect("the program runs")
    };
    let bytes = |config: &str| json(&with(config))["capacity_bytes"].as_u64();
    assert_eq!(bytes(""), Some(4 << 20));
    assert_eq!(bytes("maximum=2MiB"), Some(4 << 20));
    assert_eq!(bytes("initial=9MiB"), Some(10 << 20));
    refused(&with("inital=64MiB"), "VRAMPOOL_CONFIG: option 'inital' is not known");
}

#[test]
fn a_trace_that_no_capacity_holds_names_the_event() {
    let log = format!("{HEADER}5,0,allocate,1,4096,0\n5,1,allocate,2,1099511627776,0\n");
    let output = run_with_input(&["min-capacity", "-", "--device", "sim", "--json"], log.as_bytes());
    assert_eq!(status(&output), 1);
    let start =
        "vrampool: with the whole device, -: event 1 (line 3, thread 5, pass 1): allocate of 1099511627776 bytes failed: out of memory";
    assert!(stderr(&output).starts_with(start), "{}", stderr(&output));
    let report = json(&output);
    assert_eq!((&report["capacity_bytes"], &report["first_failure"]["event"]), (&Value::Null, &Value::from(1)));
    let table = run_with_input(&["min-capacity", "-", "--device", "sim"], log.as_bytes());
    assert_eq!((status(&table), stderr(&table)), (1, stderr(&output)));
}

#[test]
fn a_trace_without_bytes_has_the_smallest_capacity_there_is() {
    let output = run_with_input(&["min-capacity", "-", "--device", "sim", "--json"], HEADER.as_bytes());
    assert_eq!(status(&output), 0);
    let report = json(&output);
    assert_eq!((&report["capacity_bytes"], &report["capacity_over_live"]), (&Value::from(2 << 20), &Value::Null));
}

#[test]
fn what_min_capacity_cannot_use_is_refused() {
    let path = data("rmm.csv");
    refused(&run(&["min-capacity"]), "TRACE");
    for option in ["--lag=1ms", "--capacity=8GiB", "--verify", "--repeat=2"] {
        refused(&run(&["min-capacity", &path, option]), option.split('=').next().expect("a name"));
    }
    refused(&run(&["min-capacity", &path, &data("cut.csv")]), "cut.csv: line 4: 4 fields");
    refused(&run(&["min-capacity", "-", "-"]), "once only");
    refused(&run(&["min-capacity", &path, "--device", "cuda:0"]), "cuda:0 cannot be used: no CUDA");
}

#[test]
fn one_pass_has_no_warm_figures() {
    let report = json(&run(&["replay", &data("rmm.csv"), "--json", "--repeat", "1"]));
    for field in ["warm_ns_per_event", "driver_calls_warm", "driver_ms_warm"] {
        assert_eq!(report[field], Value::Null, "{field}");
    }
    assert_eq!((&report["recorded_failures"], &report["recorded_failures_repeated"]), (&Value::from(1), &Value::from(1)));
}

#[test]
fn several_traces_are_one_object() {
    let paths = [data("prefetch_streams.csv.gz"), data("rmm.csv")];
    let report = json(&run(&["replay", &paths[0], &paths[1], "--json"]));
    assert_eq!(report.as_object().expect("an object").len(), 1);
    let traces: Vec<_> =
        report["traces"].as_array().expect("an array").iter().map(|trace| trace["trace"].as_str().expect("a name")).collect();
    assert_eq!(traces, paths);
    let table = run(&["replay", &paths[0], &paths[1]]);
    assert_eq!(status(&table), 0);
    assert!(stdout(&table).starts_with("2 traces on the simulated device"), "{}", stdout(&table));
    for part in ["prefetch_streams", "1,932", "927.08 MiB", "rmm: allocations that failed when the trace was recorded: 1; here: 1."] {
        assert!(stdout(&table).contains(part), "{part} is not in\n{}", stdout(&table));
    }
}

#[test]
fn a_trace_comes_from_standard_input_plain_or_compressed() {
    let mut compressed = Vec::new();
    File::open(data("prefetch_streams.csv.gz")).and_then(|mut file| file.read_to_end(&mut compressed)).expect("the file is there");
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(&compressed[..]).read_to_end(&mut plain).expect("good data");
    for input in [compressed, plain] {
        let output = run_with_input(&["replay", "-", "--json", "--repeat", "1"], &input);
        assert_eq!(status(&output), 0);
        let report = json(&output);
        assert_eq!((&report["trace"], &report["events"]), (&Value::from("-"), &Value::from(1932)));
    }
    refused(&run_with_input(&["replay", "-", "-"], b""), "once only");
}

#[test]
fn compression_is_told_by_the_bytes_and_not_by_the_name() {
    let mut compressed = Vec::new();
    File::open(data("prefetch_streams.csv.gz")).and_then(|mut file| file.read_to_end(&mut compressed)).expect("the file is there");
    for (name, contents) in [("compressed.csv", compressed), ("plain.csv.gz", format!("{HEADER}1,0,allocate,1,1,0\n").into_bytes())] {
        assert_eq!(status(&run(&["replay", &temporary(name, &contents)])), 0, "{name}");
    }
}

#[test]
fn an_event_that_fails_is_named_and_the_status_is_one() {
    let path = data("gpt2_train.csv.gz");
    let output = run(&["replay", &path, "--capacity", "4GiB", "--device", "sim", "--json"]);
    assert_eq!(status(&output), 1);
    let report = json(&output);
    let failed = report["failed"].as_u64().expect("a number");
    assert!(failed > 1 && report["peak_reserved_bytes"].as_u64() <= Some(4 << 30));
    let first = &report["first_failure"];
    let (event, line, size) = (first["event"].as_u64().expect("an index"), first["line"].as_u64().expect("a line"), first["size"].as_u64());
    assert_eq!(line, event + 2, "a line for each event, below the header");
    let start = format!(
        "vrampool: {path}: event {event} (line {line}, thread 0, pass 1): allocate of {} bytes failed: out of memory",
        size.expect("bytes")
    );
    assert!(stderr(&output).starts_with(&start), "{}", stderr(&output));
    assert_eq!(stderr(&output).lines().count(), 1);

    let table = run(&["replay", &path, "--capacity", "4GiB", "--device", "sim"]);
    assert_eq!(status(&table), 1);
    assert!(stdout(&table).contains("gpt2_train: FAILED requests: "), "{}", stdout(&table));
    assert_eq!(stderr(&table), stderr(&output));

    // A trace that fits does not hide one that does not.
    let both = run(&["replay", &data("rmm.csv"), &path, "--capacity", "4GiB", "--device", "sim", "--json"]);
    assert_eq!(status(&both), 1);
    assert_eq!(stderr(&both), stderr(&output));
}

#[test]
fn a_capacity_that_suffices_is_kept() {
    let report = json(&run(&["replay", &data("small_model.csv.gz"), "--capacity", "64MiB", "--json", "--repeat", "2"]));
    assert_eq!(report["failed"], 0);
    assert!(report["peak_reserved_bytes"].as_u64() <= Some(64 << 20));
}

#[test]
fn a_size_that_no_pool_can_serve_fails() {
    let output = run_with_input(&["replay", "-", "--device", "sim"], format!("{HEADER}5,0,allocate,1,18446744073709551615,0\n").as_bytes());
    assert_eq!(status(&output), 1);
    assert!(
        stderr(&output).starts_with("vrampool: -: event 0 (line 2, thread 5, pass 1): allocate of 18446744073709551615 bytes failed: ")
    );
}

#[test]
fn a_trace_without_events_is_replayed() {
    let output = run_with_input(&["replay", "-", "--json"], HEADER.as_bytes());
    assert_eq!(status(&output), 0);
    let report = json(&output);
    assert_eq!((&report["events"], &report["reserved_over_live"]), (&Value::from(0), &Value::Null));
    assert_eq!(status(&run_with_input(&["replay", "-"], HEADER.as_bytes())), 0);
}

#[test]
fn files_that_cannot_be_read_are_refused() {
    refused(&run(&["replay", "/no/such/trace.csv"]), "/no/such/trace.csv: ");
    refused(&run(&["replay", env!("CARGO_MANIFEST_DIR")]), "directory");
    refused(&run(&["replay", &data("cut.csv")]), "cut.csv: line 4: 4 fields");
    refused(&run(&["replay", &data("rmm.csv"), &data("cut.csv"), "--json"]), "cut.csv: line 4: 4 fields");
    refused(&run(&["replay", &temporary("snapshot.pickle", b"\x80\x04\x95\x10")]), "only RMM's CSV log is read");
    refused(&run(&["replay", &temporary("text.csv", b"hello\n")]), "line 1: no column is named Thread");
    refused(&run(&["replay", &temporary("empty.csv", b"")]), "line 1: the file is empty");
    refused(&run_with_input(&["replay", "-"], format!("{HEADER}1,0,free,0x40,1,0\n").as_bytes()), "-: line 2: free of 0x40");
    let mut cut = Vec::new();
    File::open(data("gnn_train.csv.gz")).and_then(|file| file.take(20_000).read_to_end(&mut cut)).expect("the file is there");
    refused(&run(&["replay", &temporary("cut.csv.gz", &cut)]), "the compressed data ends early");
}

#[test]
fn arguments_that_are_unusable_are_refused() {
    let path = data("rmm.csv");
    refused(&run(&[]), "Usage");
    refused(&run(&["replay"]), "TRACE");
    refused(&run(&["fly"]), "fly");
    for option in ["--lag", "--threads", "--report"] {
        refused(&run(&["replay", &path, option]), option);
    }
    refused(&run(&["replay", &path, "--repeat", "0"]), "--repeat");
    refused(&run(&["replay", &path, "--repeat", "-1"]), "-1");
    refused(&run(&["replay", &path, "--capacity", "8GB"]), "unknown unit");
    refused(&run(&["replay", &path, "--capacity", "99999999999TiB"]), "does not fit 64 bits");
    refused(&run(&["replay", &path, "--capacity", "1MiB", "--device", "sim"]), "less than one page of 2 MiB");
    refused(&run(&["replay", &path, "--device", "tpu"]), "'tpu' is none of auto, sim, cuda:N");
    for device in ["cuda", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda:99999999999", "", "SIM"] {
        refused(&run(&["replay", &path, "--device", device]), "is none of auto, sim, cuda:N");
    }
    refused(&run(&["replay", &path, "--device", "cuda:0"]), "cuda:0 cannot be used: no CUDA");
}

#[test]
fn the_environment_chooses_the_device_and_the_option_wins() {
    let path = data("rmm.csv");
    let with = |value: &str, arguments: &[&str]| {
        vrampool()
            .args(["replay", &path, "--repeat", "1"])
            .args(arguments)
            .env("VRAMPOOL_DEVICE", value)
            .output()
            .expect("the program runs")
    };
    for (value, announced) in [("sim", ""), ("auto", SIMULATED), ("", SIMULATED)] {
        let output = with(value, &[]);
        assert_eq!((status(&output), stderr(&output)), (0, announced), "{value}");
    }
    refused(&with("tpu", &[]), "VRAMPOOL_DEVICE: 'tpu' is none of auto, sim, cuda:N");
    refused(&with("cuda:1", &[]), "cuda:1 cannot be used");
    assert_eq!(status(&with("tpu", &["--device", "sim"])), 0);
    refused(&with("sim", &["--device", "cuda:1"]), "cuda:1 cannot be used");
}

#[test]
fn info_names_the_driver_and_its_devices() {
    let output = run(&["info"]);
    assert_eq!((status(&output), stderr(&output)), (0, SIMULATED));
    for part in ["driver: simulated, CUDA 13.0", "Simulated H200", "140 GiB", "2 MiB", "virtual memory management"] {
        assert!(stdout(&output).contains(part), "{part} is not in\n{}", stdout(&output));
    }
    let output = run(&["info", "--json", "--device", "sim"]);
    assert_eq!((status(&output), stderr(&output)), (0, ""));
    let info = json(&output);
    assert_eq!((&info["driver"], &info["driver_version"]), (&Value::from("simulated"), &Value::from("13.0")));
    let device = &info["devices"][0];
    assert_eq!(device["total_bytes"], Value::from(140u64 << 30));
    assert_eq!(device["granularity_bytes"], Value::from(2 << 20));
    assert_eq!(device["virtual_memory_management"], Value::from(true));
    assert_eq!((&device["rdma"], &device["shareable"]), (&Value::from(true), &Value::from("fd+fabric")));
    refused(&run(&["info", "--device", "cuda:0"]), "cuda:0 cannot be used");
}

#[test]
fn help_and_version_are_no_failures() {
    for arguments in [&["--help"][..], &["replay", "--help"], &["min-capacity", "--help"], &["info", "--help"], &["--version"]] {
        let output = run(arguments);
        assert_eq!((status(&output), stderr(&output)), (0, ""), "{arguments:?}");
        assert!(!stdout(&output).is_empty());
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    for arguments in [&["replay", "--device", "sim", "--repeat", "1"][..], &["replay", "--device", "sim", "--repeat", "1", "--json"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = vrampool().args(arguments).arg(data("rmm.csv")).stdout(writer).output().expect("the program runs");
        assert_eq!((status(&output), stderr(&output)), (0, ""), "{arguments:?}");
    }
}

#[test]
fn an_output_that_cannot_be_written_is_a_failure() {
    let full = File::options().write(true).open("/dev/full").expect("Linux has it");
    let output = vrampool().args(["info", "--device", "sim"]).stdout(full).output().expect("the program runs");
    assert_eq!(status(&output), 1);
    assert!(stderr(&output).starts_with("vrampool: standard output: "), "{}", stderr(&output));
}

#[test]
fn the_environment_sets_the_pools_options() {
    let path = temporary("configured.csv", format!("{HEADER}1,0.5,allocate,0x100,3145728,0\n").as_bytes());
    let with = |config: &str, more: &[&str]| {
        let arguments = [&["replay", path.as_str(), "--json", "--device", "sim"], more].concat();
        vrampool().env("VRAMPOOL_CONFIG", config).args(arguments).output().expect("the program runs")
    };
    let reserved = |config: &str| json(&with(config, &[]))["peak_reserved_bytes"].as_u64();
    assert_eq!(reserved(""), Some(4 << 20));
    assert_eq!(reserved("initial=64MiB"), Some(64 << 20));
    assert_eq!(reserved("growth=32MiB,maximum=16MiB"), Some(16 << 20));
    // The command line wins over the environment.
    let failed = with("maximum=16MiB", &["--capacity", "2MiB"]);
    assert_eq!((status(&failed), json(&failed)["failed"].as_u64()), (1, Some(1)));
    refused(&with("inital=64MiB", &[]), "VRAMPOOL_CONFIG: option 'inital' is not known");
    refused(&with("maximum=1", &[]), "less than one page");
}

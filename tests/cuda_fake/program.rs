//! The program on the fake driver: what the simulated device of the program itself cannot show.

use crate::library;
use std::io::Write;
use std::process::{Command, Output, Stdio};

/// Two blocks, of a whole number of words and not.
const ROWS: &str = "Thread,Time,Action,Pointer,Size,Stream\n1,0,allocate,1,4097,0\n1,1,allocate,2,3000000,0\n1,2,free,2,3000000,0\n";

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

/// The program on a machine.
fn vrampool(profile: &str) -> Command {
    let library = library::full();
    let mut command = Command::new(env!("CARGO_BIN_EXE_vrampool"));
    command.env("VRAMPOOL_FAKE", profile).env("VRAMPOOL_LIBCUDA", library).env_remove("VRAMPOOL_CONFIG");
    // A program that is linked with the driver's library finds it in the same folder.
    command.env("LD_LIBRARY_PATH", library.parent().expect("the library lies in a folder"));
    command
}

/// Replays the blocks on a machine, and verifies them.
fn verify(profile: &str, options: &[&str]) -> Output {
    let mut command = vrampool(profile);
    command.args(["replay", "-", "--verify", "--device", "cuda:0", "--repeat", "1"]).args(options);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program runs");
    child.stdin.take().expect("a pipe").write_all(ROWS.as_bytes()).expect("the program reads");
    child.wait_with_output().expect("the program ends")
}

#[test]
fn a_replay_on_a_sound_device_is_verified() {
    for profile in ["", "vmm=0"] {
        let output = verify(profile, &[]);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""), "{profile:?}");
        assert!(text(&output.stdout).contains("verified: all 2 blocks"), "{profile:?}: {}", text(&output.stdout));
    }
}

#[test]
fn a_block_that_differs_is_named_and_the_status_is_one() {
    // The first fill proves that differences are found; then come the blocks.
    for (fill, event, size) in [(1, 0, 4097_u64), (2, 1, 3_000_000)] {
        let profile = format!("spoil={fill}");
        let output = verify(&profile, &[]);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.starts_with("vrampool: -: ") && message.lines().count() == 1, "{message}");
        for part in [format!("block of {size} bytes"), format!("allocated by event {event} "), " 1 of the 32-bit words ".to_owned()] {
            assert!(message.contains(&part), "{part:?} is not in: {message}");
        }
        let json = verify(&profile, &["--json"]);
        assert_eq!(json.status.code(), Some(1));
        let report: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
        assert_eq!((&report["mismatches"], &report["failed"]), (&1.into(), &0.into()));
        let first = &report["first_mismatch"];
        assert_eq!((&first["size"], &first["words"]), (&size.into(), &1.into()), "{first}");
    }
}

#[test]
fn a_device_that_cannot_tell_differences_verifies_nothing() {
    for profile in ["spoil=0", "backed=0"] {
        let output = verify(profile, &[]);
        assert_ne!(output.status.code(), Some(0), "{profile}");
        assert!(text(&output.stderr).contains("verified on this device"), "{profile}: {}", text(&output.stderr));
    }
}

#[test]
fn the_stream_ordered_allocator_is_measured_where_the_driver_has_it() {
    for (profile, kind, is_measured) in [
        ("", "device", true),
        ("vmm=0", "device", true),
        ("pools=0", "device", false),
        ("version=11010", "device", false),
        ("", "pinned", false),
        ("", "managed", false),
    ] {
        let mut command = vrampool(profile);
        command.args(["bench", "--device", "cuda:0", "--sizes", "256", "--threads", "1", "--kind", kind, "--json"]);
        let output = command.output().expect("the program runs");
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""), "{profile:?}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let rows = report["rows"].as_array().expect("rows");
        assert_eq!(rows.iter().any(|row| row["allocator"] == "driver_async"), is_measured, "{profile:?} {kind}");
        assert_eq!((rows.len(), report["skipped"].as_array().map(Vec::len)), (if is_measured { 8 } else { 6 }, Some(0)));
    }
}

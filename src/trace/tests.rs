//! The reader: every form that logs come in, and what it says of broken ones.

use super::{Action, Trace, fuzz_reader};
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::{self, Read, Write};

const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

fn read(log: impl AsRef<[u8]>) -> Trace {
    let trace = Trace::read("log", log.as_ref()).unwrap_or_else(|error| panic!("{error}"));
    trace.check();
    trace
}

fn rows(rows: &str) -> Trace {
    read(format!("{HEADER}{rows}"))
}

/// What the reader says of a broken log.
fn refusal(log: impl AsRef<[u8]>) -> String {
    let error = Trace::read("log", log.as_ref()).expect_err("the log is broken");
    assert!(error.is_invalid_argument());
    error.to_string()
}

#[track_caller]
fn refused(rows: &str, message: &str) {
    assert_eq!(refusal(format!("{HEADER}{rows}")), format!("log: {message}"));
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).expect("into memory");
    encoder.finish().expect("into memory")
}

/// Action, size, block, thread, stream, time and line of an event.
type Fields = (Action, u64, Option<usize>, u64, u64, u64, usize);

fn events(trace: &Trace) -> Vec<Fields> {
    let of = |event: &super::Event| {
        let (thread, stream) = (trace.threads()[event.thread()], trace.streams()[event.stream()]);
        (event.action(), event.size(), event.block(), thread, stream, event.time_ns(), event.line())
    };
    trace.events().iter().map(of).collect()
}

const PLAIN: &str = "Thread,Time,Action,Pointer,Size,Stream\n\
    7,0.000001,allocate,0xa00,512,0\n\
    8,0.000002,allocate,0xc00,100,5\n\
    7,0.000003,use,0xa00,512,5\n\
    7,0.000004,free,0xa00,512,0\n\
    8,0.000005,allocate failure,0x0,4096,5\n\
    8,0.000006,allocate,0xa00,300,5\n";

#[test]
fn a_log_is_read() {
    let trace = read(PLAIN);
    assert_eq!(
        events(&trace),
        [
            (Action::Allocate, 512, Some(0), 7, 0, 1_000, 2),
            (Action::Allocate, 100, Some(1), 8, 5, 2_000, 3),
            (Action::Use, 512, Some(0), 7, 5, 3_000, 4),
            (Action::Free, 512, Some(0), 7, 0, 4_000, 5),
            (Action::AllocateFailure, 4096, None, 8, 5, 5_000, 6),
            (Action::Allocate, 300, Some(0), 8, 5, 6_000, 7),
        ]
    );
    assert_eq!(trace.name(), "log");
    assert_eq!((trace.threads(), trace.streams()), (&[7, 8][..], &[0, 5][..]));
    assert_eq!((trace.blocks(), trace.allocations(), trace.recorded_failures()), (2, 3, 1));
    assert_eq!((trace.peak_live_bytes(), trace.duration_ns()), (612, 5_000));
}

/// One log in many forms.
#[test]
fn the_form_does_not_matter() {
    let plain = events(&read(PLAIN));
    let same = |what: &str, log: &[u8]| assert_eq!(events(&read(log)), plain, "{what}");
    same("CR LF", PLAIN.replace('\n', "\r\n").as_bytes());
    same("no line end at the end", PLAIN.trim_end().as_bytes());
    same("quotes", PLAIN.lines().map(|line| format!("\"{}\"\n", line.replace(',', "\",\""))).collect::<String>().as_bytes());
    same("quotes and CR LF", PLAIN.lines().map(|line| format!("\"{}\"\r\n", line.replace(',', "\",\""))).collect::<String>().as_bytes());
    same("spaces", PLAIN.replace(',', " ,\t").as_bytes());
    same("no prefix", PLAIN.replace("0x", "").as_bytes());
    same("capitals", PLAIN.replace("0xa00", "0XA00").as_bytes());
    same("nil", PLAIN.replace("0x0,", "(nil),").as_bytes());
    same("default", PLAIN.replace(",0\n", ",default\n").as_bytes());
    same("nil streams", PLAIN.replace(",0\n", ",(nil)\n").as_bytes());
    same("hexadecimal streams", PLAIN.replace(",0\n", ",0x0\n").replace(",5\n", ",0x5\n").as_bytes());
    same("times of day", PLAIN.replace(",0.00000", ",00:00:00:00000").as_bytes());
    same("times of day with a point", PLAIN.replace(",0.00000", ",00:00:00.00000").as_bytes());
    same("a byte order mark", format!("\u{feff}{PLAIN}").as_bytes());
    same("names in small letters", PLAIN.replace(HEADER, &HEADER.to_lowercase()).as_bytes());
    same("gzip", &gzip(PLAIN.as_bytes()));
    let (head, tail) = PLAIN.as_bytes().split_at(80);
    same("gzip in two members", &[gzip(head), gzip(tail)].concat());
}

#[test]
fn columns_are_found_by_name() {
    let trace = read("Size,Host,Stream,Pointer,Action,Time,Thread\n64,\"a, b\",3,0x40,allocate,1.5,9\n");
    assert_eq!(events(&trace), [(Action::Allocate, 64, Some(0), 9, 3, 1_500_000_000, 2)]);
}

#[test]
fn blank_lines_count_as_lines() {
    let trace = read("\r\n\nThread,Time,Action,Pointer,Size,Stream\r\n\r\n  \n1,0,allocate,1,1,0\n\n1,0,free,1,1,0\n\n");
    assert_eq!(trace.events().iter().map(|event| event.line()).collect::<Vec<_>>(), [6, 8]);
    assert_eq!(refusal("\n\nThread,Time,Action,Pointer,Size,Stream\n\n1,0,free,1,1,0"), "log: line 5: free of 0x1, where no block is live");
}

#[test]
fn a_log_without_events_is_a_log() {
    let trace = read(HEADER);
    assert_eq!((trace.events().len(), trace.blocks(), trace.peak_live_bytes(), trace.duration_ns()), (0, 0, 0, 0));
}

#[test]
fn a_pipe_may_give_single_bytes() {
    struct Dribble<'a>(&'a [u8], bool);
    impl Read for Dribble<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.1 = !self.1;
            if self.1 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            self.0.read(&mut buffer[..1])
        }
    }
    for log in [PLAIN.as_bytes().to_vec(), gzip(PLAIN.as_bytes())] {
        assert_eq!(Trace::read("log", Dribble(&log, false)).expect("the log is good"), read(PLAIN));
    }
}

#[test]
fn blocks_without_bytes_share_addresses() {
    let trace = rows(
        "1,0,allocate,(nil),0,0\n1,0,allocate,0x0,0,0\n1,0,allocate,0x40,0,0\n1,0,allocate,0x40,8,0\n1,0,allocate,0x40,0,0\n\
         1,0,use,0x40,8,0\n1,0,free,0x40,8,0\n1,0,free,0x40,0,0\n1,0,free,0x40,8,0\n1,0,free,(nil),0,0\n1,0,free,(nil),0,0\n1,0,free,(nil),0,0\n1,0,use,(nil),0,0\n",
    );
    let blocks: Vec<_> = trace.events().iter().map(|event| event.block()).collect();
    let expected = [0, 1, 2, 3, 4, 3, 3, 4, 2, 1, 0].map(Some).into_iter().chain([None, None]).collect::<Vec<_>>();
    assert_eq!(blocks, expected);
    refused("1,0,allocate,0x40,0,0\n1,0,free,0x40,0,0\n1,0,free,0x40,0,0\n", "line 4: free of 0x40, where no block is live");
}

#[test]
fn a_free_has_the_size_of_its_block() {
    let trace = rows("1,0,allocate,0x40,8,0\n1,0,free,0x40,99,0\n1,0,allocate,0x40,4,0\n1,0,free,0x40,0,0\n");
    assert_eq!(trace.events().iter().map(|event| event.size()).collect::<Vec<_>>(), [8, 8, 4, 4]);
}

#[test]
fn sizes_may_add_up_to_anything() {
    let trace = rows("1,0,allocate,0x40,18446744073709551615,0\n1,0,allocate,0x80,18446744073709551615,0\n1,0,free,0x40,1,0\n");
    assert_eq!(trace.peak_live_bytes(), u64::MAX);
}

#[test]
fn a_day_passes() {
    let trace = rows("1,23:59:59:999999,allocate,1,1,0\n2,00:00:00:000001,allocate,2,1,0\n1,23:59:59:999999,free,1,1,0\n");
    let day = 86_400_000_000_000;
    assert_eq!(trace.events().iter().map(|event| event.time_ns()).collect::<Vec<_>>(), [day - 1_000, day + 1_000, day + 1_000]);
    assert_eq!(trace.duration_ns(), 2_000);
}

#[test]
fn fields_that_are_wrong_are_named() {
    refused("x,0,allocate,1,1,0\n", "line 2: Thread 'x' is not a hexadecimal number");
    refused(",0,allocate,1,1,0\n", "line 2: Thread is empty");
    refused("1,soon,allocate,1,1,0\n", "line 2: Time 'soon' is neither seconds, within 64 bits of nanoseconds, nor HH:MM:SS:microseconds");
    refused("1,25:00:00:0,allocate,1,1,0\n", "line 2: Time '25:00:00:0' is not HH:MM:SS:microseconds");
    refused("1,0,realloc,1,1,0\n", "line 2: Action 'realloc' is none of allocate, free, use, allocate failure");
    refused("1,0,Allocate,1,1,0\n", "line 2: Action 'Allocate' is none of allocate, free, use, allocate failure");
    refused("1,0,allocate,0xq,1,0\n", "line 2: Pointer '0xq' is not a hexadecimal number");
    refused("1,0,allocate,10000000000000000,1,0\n", "line 2: Pointer '10000000000000000' does not fit 64 bits");
    refused("1,0,allocate,1,1,0\n1,0,allocate,2,-1,0\n", "line 3: Size '-1' is not a whole number");
    refused("1,0,allocate,1,18446744073709551616,0\n", "line 2: Size '18446744073709551616' does not fit 64 bits");
    refused("1,0,allocate,1,1,\n", "line 2: Stream is empty");
    refused("1,0,allocate,1,1,stream\n", "line 2: Stream 'stream' is not a hexadecimal number");
}

#[test]
fn rows_that_contradict_each_other_are_named() {
    refused("1,0,free,0x40,1,0\n", "line 2: free of 0x40, where no block is live");
    refused("1,0,allocate,0x40,1,0\n1,0,free,0x40,1,0\n1,0,free,0x40,1,0\n", "line 4: free of 0x40, where no block is live");
    refused("1,0,use,0x40,1,0\n", "line 2: use of 0x40, where no block is live");
    refused("1,0,allocate,0x40,1,0\n1,0,free,0x40,1,0\n1,0,use,0x40,1,0\n", "line 4: use of 0x40, where no block is live");
    refused("1,0,allocate,0x40,1,0\n2,0,allocate,0x40,2,0\n", "line 3: 0x40 is allocated again; it is live since line 2");
    refused("1,0,allocate,(nil),1,0\n", "line 2: allocation of 1 bytes at the null address");
    refused("1,0,allocate failure,0x40,1,0\n1,0,free,0x40,1,0\n", "line 3: free of 0x40, where no block is live");
}

#[test]
fn lines_that_are_no_rows_are_named() {
    refused("1,0,allocate,1,1,0\n1,0,allocate,0x5", "line 3: 4 fields, where the first line names 6 columns");
    refused("1,0,allocate,1,1,0,\n", "line 2: 7 fields, where the first line names 6 columns");
    refused("1,0,allocate,1,1,\"0\n1,0,free,1,1,0\n", "line 2: a quote is not closed");
    refused("1,0,allocate,1,1,0\r1,0,free,1,1,0\n", "line 2: a carriage return inside the line");
    refused(&format!("1,0,allocate,1,1,0{}\n", ",".repeat(300)), "line 2: more than 256 fields");
    refused(&format!("1,0,allocate,1,1,0\n{}", "1".repeat(1 << 20)), "line 3: longer than 65536 bytes");
    assert_eq!(refusal([HEADER.as_bytes(), b"1,0,allocate,\xff,1,0\n"].concat()), "log: line 2: not UTF-8");
}

#[test]
fn files_of_another_kind_are_refused() {
    let empty = "log: line 1: the file is empty; a log begins with the names of its columns";
    assert_eq!(refusal(""), empty);
    assert_eq!(refusal(gzip(b"")), empty);
    assert!(refusal("\n\n").starts_with("log: line 2: the file is empty"));
    assert_eq!(refusal(b"\x80\x04\x95\x00"), "log: a pickle; only RMM's CSV log is read");
    let columns = "the first line of RMM's log is Thread,Time,Action,Pointer,Size,Stream, not";
    assert_eq!(
        refusal("Thread,Time,Action,Pointer,Size\n"),
        format!("log: line 1: no column is named Stream; {columns} 'ThreadTimeActionPointerSize'")
    );
    assert_eq!(refusal("Thread,Time,Action,Pointer,Size,Stream,Time\n"), "log: line 1: two columns are named Time");
    assert!(refusal("{\"traces\": []}").starts_with("log: line 1: no column is named Thread"));
    assert_eq!(refusal(b"\x7fELF\x02\x01\x01\x00\xff\xff"), "log: line 1: not UTF-8");
}

#[test]
fn compressed_data_that_is_cut_or_damaged_is_refused() {
    // Random addresses keep the deflate stream long enough to be cut in its middle.
    let mut state = 1u64;
    let mut log = HEADER.to_owned();
    for _ in 0..2000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        log += &format!("1,0,allocate,{state:#x},256,0\n");
    }
    let whole = gzip(log.as_bytes());
    read(&whole);
    for length in [2, 9, 10, whole.len() / 2, whole.len() - 9, whole.len() - 8, whole.len() - 1] {
        let message = refusal(&whole[..length]);
        assert!(message.ends_with("the compressed data ends early: the file is cut"), "{length}: {message}");
    }
    let line = refusal(&whole[..whole.len() / 2]).trim_start_matches("log: line ").split(':').next().expect("a line").to_owned();
    assert!((900..1100).contains(&line.parse().expect("a number")), "about half the lines were read: {line}");
    let mut wrong_sum = whole.clone();
    let sum = whole.len() - 8;
    wrong_sum[sum] ^= 1;
    assert!(refusal(&wrong_sum).contains("the compressed data is damaged"));
    assert!(refusal([&whole[..], b"junk"].concat()).contains("the compressed data"));
}

#[test]
fn files_that_cannot_be_opened_are_refused() {
    let missing = Trace::open("/no/such/trace.csv").expect_err("there is none");
    assert!(missing.is_invalid_argument() && missing.to_string().starts_with("/no/such/trace.csv: "), "{missing}");
    let folder = Trace::open(env!("CARGO_MANIFEST_DIR")).expect_err("a folder");
    assert!(folder.is_invalid_argument() && folder.to_string().contains("directory"), "{folder}");
}

mod properties {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// A row as the test means it.
    #[derive(Clone, Debug)]
    struct Meant {
        action: Action,
        address: u64,
        size: u64,
        thread: u64,
        stream: u64,
        micros: u64,
    }

    /// Turns arbitrary numbers into a sequence that may happen.
    fn meant(steps: Vec<(u8, u64, usize, u64, u64, u64)>) -> Vec<Meant> {
        let mut live: Vec<(u64, u64)> = Vec::new();
        let mut micros = 0;
        steps
            .into_iter()
            .enumerate()
            .map(|(index, (kind, size, pick, thread, stream, pause))| {
                micros += pause;
                let (action, (address, size)) = match kind {
                    0..=4 => {
                        let block = ((index as u64 + 1) << 8, size.max(1));
                        live.push(block);
                        (Action::Allocate, block)
                    }
                    5 => (Action::AllocateFailure, (0, size)),
                    6 if !live.is_empty() => (Action::Use, live[pick % live.len()]),
                    _ if !live.is_empty() => (Action::Free, live.swap_remove(pick % live.len())),
                    _ => (Action::Free, (0, 0)),
                };
                Meant { action, address, size, thread, stream, micros }
            })
            .collect()
    }

    fn steps() -> impl Strategy<Value = Vec<(u8, u64, usize, u64, u64, u64)>> {
        vec(
            (0u8..12, prop_oneof![any::<u64>(), 0u64..4096], any::<usize>(), 0u64..4, prop_oneof![Just(0), any::<u64>()], 0u64..3_000_000),
            0..200,
        )
    }

    /// How a log is written.
    #[derive(Clone, Debug)]
    struct Form {
        columns: Vec<usize>,
        quotes: bool,
        line_end: &'static str,
        prefix: bool,
        clock: bool,
        gzip: bool,
    }

    fn form() -> impl Strategy<Value = Form> {
        let columns = Just((0..7).collect::<Vec<usize>>()).prop_shuffle();
        (columns, any::<bool>(), prop_oneof![Just("\n"), Just("\r\n"), Just("\n\n")], any::<bool>(), any::<bool>(), any::<bool>())
            .prop_map(|(columns, quotes, line_end, prefix, clock, gzip)| Form { columns, quotes, line_end, prefix, clock, gzip })
    }

    fn written(meant: &[Meant], form: &Form) -> Vec<u8> {
        let mut log = String::new();
        let mut line = |fields: [String; 7]| {
            let fields =
                form.columns.iter().map(|&column| if form.quotes { format!("\"{}\"", fields[column]) } else { fields[column].clone() });
            log += &fields.collect::<Vec<_>>().join(",");
            log += form.line_end;
        };
        line(["Thread", "Time", "Action", "Pointer", "Size", "Stream", "Note"].map(str::to_owned));
        for row in meant {
            let (seconds, micros) = (row.micros / 1_000_000, row.micros % 1_000_000);
            let time = if form.clock {
                format!("{:02}:{:02}:{:02}:{micros:06}", seconds / 3600 % 24, seconds / 60 % 60, seconds % 60)
            } else {
                format!("{seconds}.{micros:06}")
            };
            let pointer = match (row.address, form.prefix) {
                (0, true) => "(nil)".to_owned(),
                (address, true) => format!("{address:#x}"),
                (address, false) => format!("{address:x}"),
            };
            let stream = if form.prefix { format!("{:#x}", row.stream) } else { row.stream.to_string() };
            line([row.thread.to_string(), time, row.action.to_string(), pointer, row.size.to_string(), stream, "x".to_owned()]);
        }
        if form.gzip { gzip(log.as_bytes()) } else { log.into_bytes() }
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(steps in steps(), form in form()) {
            let meant = meant(steps);
            let trace = read(written(&meant, &form));
            prop_assert_eq!(trace.events().len(), meant.len());
            for (event, row) in trace.events().iter().zip(&meant) {
                prop_assert_eq!(event.action(), row.action);
                prop_assert_eq!(event.size(), row.size);
                prop_assert_eq!(event.time_ns(), row.micros * 1000);
                prop_assert_eq!(trace.threads()[event.thread()], row.thread);
                prop_assert_eq!(trace.streams()[event.stream()], row.stream);
            }
        }

        #[test]
        fn bytes_never_panic(bytes in vec(any::<u8>(), 0..400)) {
            fuzz_reader(&bytes);
        }

        #[test]
        fn a_damaged_log_is_refused_or_consistent(
            steps in steps(),
            form in form(),
            damage in vec((any::<prop::sample::Index>(), prop_oneof![any::<u8>(), Just(b','), Just(b'\n'), Just(b'"'), Just(b'0')]), 1..4),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut log = written(&meant(steps), &form);
            for (at, byte) in damage {
                let at = at.index(log.len());
                log[at] = byte;
            }
            log.truncate(cut.index(log.len()) + 1);
            fuzz_reader(&log);
        }
    }
}

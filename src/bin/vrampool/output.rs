//! The program's two outputs: results on standard output, all else on standard error.

use crate::Failure;
use serde_json::{Value, json};
use std::io::{self, ErrorKind, Write};

/// Writes a result. A reader that has gone away (`| head`) is no failure.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::Work(format!("standard output: {error}"))),
        _ => Ok(()),
    }
}

pub(crate) fn print_json(value: &Value) -> Result<(), Failure> {
    print(&format!("{value:#}\n"))
}

/// One trace's values, or those of several.
pub(crate) fn print_traces(mut values: Vec<Value>) -> Result<(), Failure> {
    match values.len() {
        1 => print_json(&values.remove(0)),
        _ => print_json(&json!({ "traces": values })),
    }
}

/// Says something to the user, in one line. There is nobody to tell where that fails.
pub(crate) fn complain(message: &str) {
    let _ = writeln!(io::stderr(), "vrampool: {message}");
}

//! Reads RMM's CSV log.
//!
//! A line is a row: no field of the log has a line break in it. So the reader takes the file line by line, which keeps
//! line numbers exact and memory bounded whatever the file holds, and leaves what is inside a line to the CSV parser.

use super::builder::{Builder, Row};
use super::event::Trace;
use super::field;
use crate::error::{Error, Result};
use csv_core::ReadRecordResult;
use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

/// The longest line, its end not counted. RMM's are shorter than 100 bytes.
const LINE_LIMIT: usize = 64 << 10;
/// The most fields of a line.
const FIELD_LIMIT: usize = 256;
const BUFFER_BYTES: usize = 256 << 10;
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

impl Trace {
    /// Reads a trace from a file; [`Trace::read`] says which files are read. The trace's name is the path.
    ///
    /// # Errors
    /// [`is_invalid_argument`](Error::is_invalid_argument), as [`Trace::read`], and where the file cannot be opened.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|error| Error::invalid_argument(format!("{}: {error}", path.display())))?;
        Self::read(path.display().to_string(), file)
    }

    /// Reads a trace in the form of RMM's log, plain or gzip-compressed, which the first bytes tell.
    ///
    /// The first line names the columns. `Thread`, `Time`, `Action`, `Pointer`, `Size` and `Stream` must be there, in any
    /// order; others are passed over.
    ///
    /// | column | what it holds |
    /// |---|---|
    /// | Thread | a number |
    /// | Time | seconds, or `HH:MM:SS:microseconds`, which may pass midnight. A time before the row above counts as that row's |
    /// | Action | `allocate`, `free`, `use` (from here on the block is used on this stream too), or `allocate failure` |
    /// | Pointer | the address, hexadecimal with or without `0x`; `(nil)` is the null address |
    /// | Size | bytes asked for. A free's is not looked at, but for telling a block of no bytes from one that shares its address |
    /// | Stream | the handle: decimal, or hexadecimal with `0x` or a digit above 9; `0`, `(nil)` and `default` are the default stream |
    ///
    /// Fields may be quoted and have spaces round them, lines may end in CR LF, and blank lines are passed over. A block
    /// of no bytes may lie at any address, the null address too. A free of the null address that nothing returned is
    /// kept as an event that names no block.
    ///
    /// # Errors
    /// [`is_invalid_argument`](Error::is_invalid_argument) with the line and what is wrong: a field that is not what its
    /// column holds, more or fewer fields than columns, an address allocated while it is live, a free or a use where
    /// nothing is live, bytes that are not UTF-8, compressed data that is damaged or ends early, a failure to read.
    pub fn read(name: impl Into<String>, reader: impl Read) -> Result<Self> {
        let name = name.into();
        let fail = |message: String| Error::invalid_argument(format!("{name}: {message}"));
        let (start, reader) = peek(reader).map_err(|error| fail(error.to_string()))?;
        // What the pickle module writes begins with the opcode PROTO and a version.
        if matches!(start, [0x80, 2..=5]) {
            return Err(fail("a pickle; only RMM's CSV log is read".to_owned()));
        }
        let reader = BufReader::with_capacity(BUFFER_BYTES, reader);
        let built =
            if start == GZIP_MAGIC { rows(BufReader::with_capacity(BUFFER_BYTES, MultiGzDecoder::new(reader))) } else { rows(reader) };
        match built {
            Ok(builder) => Ok(builder.finish(name)),
            Err((line, message)) => Err(fail(format!("line {line}: {message}"))),
        }
    }
}

/// The first two bytes (zeros where there are fewer), and a reader that gives them again.
fn peek(mut reader: impl Read) -> io::Result<([u8; 2], impl Read)> {
    let mut start = Vec::with_capacity(2);
    reader.by_ref().take(2).read_to_end(&mut start)?;
    let bytes = [start.first().copied().unwrap_or(0), start.get(1).copied().unwrap_or(0)];
    Ok((bytes, Cursor::new(start).chain(reader)))
}

/// Reads the header and all rows. An error comes with the line that it is about.
fn rows(reader: impl BufRead) -> Result<Builder, (u32, String)> {
    let mut lines = Lines { reader, text: Vec::new(), number: 0 };
    let mut fields = Fields::new();
    let mut builder = Builder::default();
    let mut columns = None;
    loop {
        match lines.advance() {
            Ok(true) => {}
            Ok(false) => break,
            Err(message) => return Err((lines.number, message)),
        }
        let line = lines.line();
        if line.trim_ascii().is_empty() {
            continue;
        }
        row(line, lines.number, &mut fields, &mut columns, &mut builder).map_err(|message| (lines.number, message))?;
    }
    match columns {
        Some(_) => Ok(builder),
        None => Err((lines.number.max(1), "the file is empty; a log begins with the names of its columns".to_owned())),
    }
}

/// Reads one line: the names of the columns where they are not known yet, otherwise a row.
fn row(line: &[u8], number: u32, fields: &mut Fields, columns: &mut Option<Columns>, builder: &mut Builder) -> Result<(), String> {
    let fields = fields.split(line)?;
    let Some(columns) = columns else {
        *columns = Some(Columns::find(&fields)?);
        return Ok(());
    };
    if fields.len() != columns.count {
        return Err(format!("{} fields, where the first line names {} columns", fields.len(), columns.count));
    }
    builder.push(&Row {
        thread: field::thread(fields.get(columns.thread))?,
        time: field::time(fields.get(columns.time))?,
        action: field::action(fields.get(columns.action))?,
        pointer: field::pointer(fields.get(columns.pointer))?,
        size: field::decimal("Size", fields.get(columns.size))?,
        stream: field::stream(fields.get(columns.stream))?,
        line: number,
    })
}

/// The lines of a file, one at a time.
struct Lines<R> {
    reader: R,
    text: Vec<u8>,
    /// The line in `text`, from one.
    number: u32,
}

impl<R: BufRead> Lines<R> {
    /// Goes to the next line; `false` where there is none. An error is about the line whose number stands.
    fn advance(&mut self) -> Result<bool, String> {
        self.text.clear();
        // The last number stays free for `Event::NO_BLOCK`.
        if self.number == u32::MAX - 1 {
            return Err(format!("more than {} lines", self.number));
        }
        self.number += 1;
        let limit = LINE_LIMIT as u64 + 2;
        let read = self.reader.by_ref().take(limit).read_until(b'\n', &mut self.text).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => "the compressed data ends early: the file is cut".to_owned(),
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => format!("the compressed data is damaged: {error}"),
            _ => error.to_string(),
        })?;
        if read == 0 {
            self.number -= 1;
            return Ok(false);
        }
        if self.line().len() > LINE_LIMIT {
            return Err(format!("longer than {LINE_LIMIT} bytes"));
        }
        Ok(true)
    }

    /// The line without its end.
    fn line(&self) -> &[u8] {
        let line = self.text.strip_suffix(b"\n").unwrap_or(&self.text);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if self.number == 1 { line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line) } else { line }
    }
}

/// Splits a line into fields.
struct Fields {
    parser: csv_core::Reader,
    text: Vec<u8>,
    ends: Vec<usize>,
}

/// The fields of one line.
struct Split<'a> {
    text: &'a str,
    ends: &'a [usize],
}

impl Fields {
    fn new() -> Self {
        Self { parser: csv_core::Reader::new(), text: vec![0; LINE_LIMIT], ends: vec![0; FIELD_LIMIT] }
    }

    fn split(&mut self, line: &[u8]) -> Result<Split<'_>, String> {
        if line.iter().filter(|&&byte| byte == b'"').count() % 2 != 0 {
            return Err("a quote is not closed".to_owned());
        }
        self.parser.reset();
        let (result, read, text, ends) = self.parser.read_record(line, &mut self.text, &mut self.ends);
        // The parser takes a carriage return for a line's end.
        if read < line.len() && result == ReadRecordResult::Record {
            return Err("a carriage return inside the line".to_owned());
        }
        let (mut text_end, mut count) = (text, ends);
        let mut result = result;
        if result == ReadRecordResult::InputEmpty {
            // No more input: the record ends.
            let (last, _, text, ends) = self.parser.read_record(&[], &mut self.text[text_end..], &mut self.ends[count..]);
            (result, text_end, count) = (last, text_end + text, count + ends);
        }
        match result {
            ReadRecordResult::Record => {}
            ReadRecordResult::OutputEndsFull => return Err(format!("more than {FIELD_LIMIT} fields")),
            ReadRecordResult::OutputFull | ReadRecordResult::InputEmpty | ReadRecordResult::End => {
                return Err("no row of a CSV file".to_owned());
            }
        }
        let text = std::str::from_utf8(&self.text[..text_end]).map_err(|_| "not UTF-8".to_owned())?;
        Ok(Split { text, ends: &self.ends[..count] })
    }
}

impl<'a> Split<'a> {
    fn len(&self) -> usize {
        self.ends.len()
    }

    /// A field without the spaces round it; empty where there is none.
    fn get(&self, index: usize) -> &'a str {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        self.text.get(start..self.ends[index]).unwrap_or_default().trim_ascii()
    }
}

/// Where each column stands.
#[derive(Clone, Copy, Debug)]
struct Columns {
    thread: usize,
    time: usize,
    action: usize,
    pointer: usize,
    size: usize,
    stream: usize,
    count: usize,
}

impl Columns {
    fn find(header: &Split<'_>) -> Result<Self, String> {
        let find = |name: &str| {
            let mut places = (0..header.len()).filter(|&index| header.get(index).eq_ignore_ascii_case(name));
            match (places.next(), places.next()) {
                (Some(index), None) => Ok(index),
                (Some(_), Some(_)) => Err(format!("two columns are named {name}")),
                (None, _) => Err(format!(
                    "no column is named {name}; the first line of RMM's log is Thread,Time,Action,Pointer,Size,Stream, not {}",
                    field::shown(header.text)
                )),
            }
        };
        Ok(Self {
            thread: find("Thread")?,
            time: find("Time")?,
            action: find("Action")?,
            pointer: find("Pointer")?,
            size: find("Size")?,
            stream: find("Stream")?,
            count: header.len(),
        })
    }
}

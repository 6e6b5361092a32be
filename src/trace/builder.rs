//! From rows to a trace: which address is which block, and what may follow what.

use super::event::{Action, Event, Trace};
use super::field::Time;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

const NS_PER_HOUR: u64 = 3_600_000_000_000;
const NS_PER_DAY: u64 = 24 * NS_PER_HOUR;

/// The fields of one row, read but not yet understood.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) thread: u64,
    pub(super) time: Time,
    pub(super) action: Action,
    pub(super) pointer: u64,
    pub(super) size: u64,
    pub(super) stream: u64,
    pub(super) line: u32,
}

/// A trace in the making. Memory is bounded by the rows; a row costs a look-up in two or three hash tables.
#[derive(Debug, Default)]
pub(super) struct Builder {
    events: Vec<Event>,
    threads: Names,
    streams: Names,
    clock: Clock,
    /// Live blocks of one byte and more, by address.
    live: HashMap<u64, Block>,
    /// Live blocks of no bytes, by address, the latest last. They take no room, so that several may share an address
    /// (the null address above all) with each other and with a block that has bytes.
    empty: HashMap<u64, Vec<Block>>,
    /// Numbers of freed blocks.
    free_numbers: Vec<u32>,
    blocks: u32,
    allocations: usize,
    recorded_failures: usize,
    /// Sums of 2^32 sizes of 64 bits fit.
    live_bytes: u128,
    peak_live_bytes: u128,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    number: u32,
    size: u64,
    line: u32,
}

impl Builder {
    /// Adds a row.
    ///
    /// # Errors
    /// What is wrong with it. The builder is of no use afterwards.
    pub(super) fn push(&mut self, row: &Row) -> Result<(), String> {
        let (block, size) = match row.action {
            Action::Allocate => (self.allocate(row)?, row.size),
            Action::AllocateFailure => {
                self.recorded_failures += 1;
                (Event::NO_BLOCK, row.size)
            }
            Action::Free => match self.free(row) {
                Some(block) => (block.number, block.size),
                None if row.pointer == 0 => (Event::NO_BLOCK, row.size),
                None => return Err(format!("free of {:#x}, where no block is live", row.pointer)),
            },
            Action::Use => match self.find(row) {
                Some(block) => (block.number, block.size),
                None if row.pointer == 0 => (Event::NO_BLOCK, row.size),
                None => return Err(format!("use of {:#x}, where no block is live", row.pointer)),
            },
        };
        self.events.push(Event {
            size,
            time_ns: self.clock.advance(row.time),
            block,
            thread: self.threads.index_of(row.thread),
            stream: self.streams.index_of(row.stream),
            line: row.line,
            action: row.action,
        });
        Ok(())
    }

    pub(super) fn finish(self, name: String) -> Trace {
        Trace {
            name,
            events: self.events,
            threads: self.threads.values,
            streams: self.streams.values,
            blocks: self.blocks as usize,
            allocations: self.allocations,
            recorded_failures: self.recorded_failures,
            peak_live_bytes: u64::try_from(self.peak_live_bytes).unwrap_or(u64::MAX),
        }
    }

    fn allocate(&mut self, row: &Row) -> Result<u32, String> {
        if row.pointer == 0 && row.size != 0 {
            return Err(format!("allocation of {} bytes at the null address", row.size));
        }
        // Rows are counted in 32 bits, so that numbers stay below `Event::NO_BLOCK`.
        let number = self.free_numbers.last().copied().unwrap_or(self.blocks);
        let block = Block { number, size: row.size, line: row.line };
        if row.size == 0 {
            self.empty.entry(row.pointer).or_default().push(block);
        } else {
            match self.live.entry(row.pointer) {
                Entry::Occupied(other) => {
                    return Err(format!("{:#x} is allocated again; it is live since line {}", row.pointer, other.get().line));
                }
                Entry::Vacant(entry) => _ = entry.insert(block),
            }
        }
        if self.free_numbers.pop().is_none() {
            self.blocks += 1;
        }
        self.allocations += 1;
        self.live_bytes += u128::from(row.size);
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes);
        Ok(number)
    }

    fn free(&mut self, row: &Row) -> Option<Block> {
        let block = match self.has_empty(row) {
            true => self.empty.get_mut(&row.pointer)?.pop()?,
            false => self.live.remove(&row.pointer)?,
        };
        self.free_numbers.push(block.number);
        self.live_bytes -= u128::from(block.size);
        Some(block)
    }

    fn find(&self, row: &Row) -> Option<Block> {
        match self.has_empty(row) {
            true => self.empty.get(&row.pointer)?.last().copied(),
            false => self.live.get(&row.pointer).copied(),
        }
    }

    /// Whether a row means an empty block: one is at its address, and either the row says no bytes or nothing else is
    /// there.
    fn has_empty(&self, row: &Row) -> bool {
        !self.empty.is_empty()
            && self.empty.get(&row.pointer).is_some_and(|blocks| !blocks.is_empty())
            && (row.size == 0 || !self.live.contains_key(&row.pointer))
    }
}

/// Values numbered in the order in which they first come up.
#[derive(Debug, Default)]
struct Names {
    values: Vec<u64>,
    indices: HashMap<u64, u32>,
    /// The last answer: neighbouring rows mostly name the same.
    last: Option<(u64, u32)>,
}

impl Names {
    fn index_of(&mut self, value: u64) -> u32 {
        if let Some((last, index)) = self.last
            && last == value
        {
            return index;
        }
        let values = &mut self.values;
        let index = *self.indices.entry(value).or_insert_with(|| {
            values.push(value);
            // No more values than rows, which are counted in 32 bits.
            (values.len() - 1) as u32
        });
        self.last = Some((value, index));
        index
    }
}

/// Makes one ascending time of what the rows say.
///
/// A time of day that falls back by more than twelve hours is of the next day. A log of several threads may hold rows a
/// little out of order: those count as simultaneous with the row before, right after midnight too.
#[derive(Debug, Default)]
struct Clock {
    day: u64,
    time_of_day: u64,
    time: u64,
}

impl Clock {
    fn advance(&mut self, time: Time) -> u64 {
        let time = match time {
            Time::Elapsed(ns) => ns,
            Time::Clock(ns) => {
                let late = self.day > 0 && ns > self.time_of_day + 23 * NS_PER_HOUR;
                if !late {
                    if self.time_of_day > ns + 12 * NS_PER_HOUR {
                        self.day += 1;
                    }
                    self.time_of_day = ns;
                }
                self.day.saturating_mul(NS_PER_DAY).saturating_add(self.time_of_day)
            }
        };
        self.time = self.time.max(time);
        self.time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_day_wrap_at_midnight_and_never_fall() {
        let hour = |hours: u64| Time::Clock(hours * NS_PER_HOUR);
        let mut clock = Clock::default();
        for (time, expected) in [
            (hour(22), 22),
            (hour(21), 22), // a little out of order
            (hour(23), 23),
            (hour(0), 24),
            (Time::Clock(23 * NS_PER_HOUR + 1), 24), // from before midnight, logged after
            (hour(1), 25),
            (hour(14), 38), // a pause of more than half a day
            (hour(1), 49),
        ] {
            assert_eq!(clock.advance(time), expected * NS_PER_HOUR, "{time:?}");
        }
    }

    /// A file can hold more midnights than 64 bits of nanoseconds hold days.
    #[test]
    fn days_beyond_64_bits_count_as_the_last_moment() {
        let mut clock = Clock::default();
        let mut last = 0;
        for hour in [0, 13].repeat(250_000) {
            let time = clock.advance(Time::Clock(hour * NS_PER_HOUR));
            assert!(time >= last);
            last = time;
        }
        assert_eq!(last, u64::MAX);
    }

    #[test]
    fn elapsed_times_never_fall() {
        let mut clock = Clock::default();
        for (time, expected) in [(5, 5), (3, 5), (6, 6), (u64::MAX, u64::MAX), (0, u64::MAX)] {
            assert_eq!(clock.advance(Time::Elapsed(time)), expected);
        }
    }
}

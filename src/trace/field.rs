//! The fields of a log's row: text to numbers, each with a sentence for what is wrong with it.

use super::event::Action;

const NS_PER_SECOND: u64 = 1_000_000_000;

/// What a `Time` field says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Time {
    /// Nanoseconds since an origin of the program's own.
    Elapsed(u64),
    /// Nanoseconds since midnight.
    Clock(u64),
}

pub(super) fn action(text: &str) -> Result<Action, String> {
    Ok(match text {
        "allocate" => Action::Allocate,
        "free" => Action::Free,
        "use" => Action::Use,
        "allocate failure" => Action::AllocateFailure,
        _ => return Err(format!("Action {} is none of allocate, free, use, allocate failure", shown(text))),
    })
}

/// A whole decimal number, with no sign.
pub(super) fn decimal(column: &str, text: &str) -> Result<u64, String> {
    if text.is_empty() {
        return Err(format!("{column} is empty"));
    }
    if !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!("{column} {} is not a whole number", shown(text)));
    }
    text.parse().map_err(|_| format!("{column} {} does not fit 64 bits", shown(text)))
}

/// Hexadecimal digits, with no prefix.
fn hexadecimal(column: &str, text: &str, digits: &str) -> Result<u64, String> {
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(format!("{column} {} is not a hexadecimal number", shown(text)));
    }
    u64::from_str_radix(digits, 16).map_err(|_| format!("{column} {} does not fit 64 bits", shown(text)))
}

fn without_prefix(text: &str) -> Option<&str> {
    text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"))
}

/// An address: hexadecimal with or without `0x`, or `(nil)`.
pub(super) fn pointer(text: &str) -> Result<u64, String> {
    match text {
        "" => Err("Pointer is empty".to_owned()),
        "(nil)" => Ok(0),
        _ => hexadecimal("Pointer", text, without_prefix(text).unwrap_or(text)),
    }
}

/// A number that names something: decimal, or hexadecimal where it has the prefix or a digit above 9.
fn name(column: &str, text: &str) -> Result<u64, String> {
    match without_prefix(text) {
        Some(digits) => hexadecimal(column, text, digits),
        None if text.bytes().any(|b| !b.is_ascii_digit()) => hexadecimal(column, text, text),
        None => decimal(column, text),
    }
}

/// A thread's number.
pub(super) fn thread(text: &str) -> Result<u64, String> {
    name("Thread", text)
}

/// A stream's handle: a number, `(nil)`, or `default`.
pub(super) fn stream(text: &str) -> Result<u64, String> {
    match text {
        "(nil)" | "default" => Ok(0),
        _ => name("Stream", text),
    }
}

pub(super) fn time(text: &str) -> Result<Time, String> {
    if text.is_empty() {
        return Err("Time is empty".to_owned());
    }
    if text.contains(':') {
        return clock(text).map(Time::Clock).ok_or_else(|| format!("Time {} is not HH:MM:SS:microseconds", shown(text)));
    }
    if let Some(ns) = seconds(text) {
        return Ok(Time::Elapsed(ns));
    }
    // Languages print very short times with an exponent: 1e-05.
    let exponent = text.starts_with(|c: char| c.is_ascii_digit()) && text.contains(['e', 'E']);
    let ns = exponent.then(|| text.parse::<f64>().ok()).flatten().map(|seconds| seconds * NS_PER_SECOND as f64);
    match ns {
        Some(ns) if ns < u64::MAX as f64 => Ok(Time::Elapsed(ns as u64)),
        _ => Err(format!("Time {} is neither seconds, within 64 bits of nanoseconds, nor HH:MM:SS:microseconds", shown(text))),
    }
}

/// Digits with an optional fraction. Digits behind the ninth decimal are dropped. `None` for anything else, a number of
/// nanoseconds beyond 64 bits among it.
fn seconds(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(fraction) {
        return None;
    }
    whole.parse::<u64>().ok()?.checked_mul(NS_PER_SECOND)?.checked_add(decimals(fraction, 9))
}

/// `HH:MM:SS:micro` or `HH:MM:SS.fraction`; versions of RMM differ.
fn clock(text: &str) -> Option<u64> {
    let two = |text: &str, limit: u64| {
        let valid = (1..=2).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
        valid.then(|| text.parse().ok()).flatten().filter(|&value: &u64| value < limit)
    };
    let (hours, rest) = text.split_once(':')?;
    let (minutes, rest) = rest.split_once(':')?;
    let (seconds, below) = match rest.split_once([':', '.']) {
        Some((seconds, below)) => {
            if below.is_empty() || below.len() > 9 || !below.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            if rest.as_bytes()[seconds.len()] == b'.' {
                (seconds, decimals(below, 9))
            } else {
                (seconds, below.parse().ok().filter(|&micros: &u64| micros < 1_000_000)? * 1000)
            }
        }
        None => (rest, 0),
    };
    // 60 is a leap second.
    Some(((two(hours, 24)? * 60 + two(minutes, 60)?) * 60 + two(seconds, 61)?) * NS_PER_SECOND + below)
}

/// The first `places` decimals as a whole number: "5" of nine places is 500,000,000.
fn decimals(digits: &str, places: usize) -> u64 {
    digits.bytes().chain(std::iter::repeat(b'0')).take(places).fold(0, |value, digit| value * 10 + u64::from(digit - b'0'))
}

/// A field's text for a message: quoted, escaped, and cut where it is long.
pub(super) fn shown(text: &str) -> String {
    const LONGEST: usize = 40;
    let mut shown: String = text.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if text.chars().nth(LONGEST).is_some() {
        shown.push('…');
    }
    format!("'{shown}'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers() {
        for (text, address) in [
            ("0x7f02a7e00000", 0x7f02_a7e0_0000),
            ("0X7F02A7E00000", 0x7f02_a7e0_0000),
            ("7f02a7e00000", 0x7f02_a7e0_0000),
            ("10", 16),
            ("(nil)", 0),
            ("0x0", 0),
            ("0", 0),
            ("ffffffffffffffff", u64::MAX),
        ] {
            assert_eq!(pointer(text), Ok(address), "{text}");
        }
        for text in ["", "0x", "nil", "0x1g", "-1", "+1", "0x0x1", "10000000000000000", "0x 1"] {
            assert!(pointer(text).is_err(), "{text}");
        }
    }

    #[test]
    fn streams_and_threads() {
        for (text, value) in [
            ("0", 0),
            ("default", 0),
            ("(nil)", 0),
            ("0x0", 0),
            ("782294112", 782_294_112),
            ("0x55d0c8a3b2f0", 0x55d0_c8a3_b2f0),
            ("55d0c8a3b2f0", 0x55d0_c8a3_b2f0),
        ] {
            assert_eq!(stream(text), Ok(value), "{text}");
        }
        assert_eq!(stream("18446744073709551615"), Ok(u64::MAX));
        for text in ["", "0x", "stream", "-1", "18446744073709551616", "1.0"] {
            assert!(stream(text).is_err(), "{text}");
            assert!(thread(text).is_err(), "{text}");
        }
        assert_eq!(thread("140234"), Ok(140_234));
        assert_eq!(thread("0x10"), Ok(16));
    }

    #[test]
    fn sizes() {
        assert_eq!(decimal("Size", "0"), Ok(0));
        assert_eq!(decimal("Size", "18446744073709551615"), Ok(u64::MAX));
        assert_eq!(decimal("Size", "18446744073709551616"), Err("Size '18446744073709551616' does not fit 64 bits".to_owned()));
        for text in ["", "-1", "+1", "1.0", "0x10", "1e3", "1 0", "١"] {
            assert!(decimal("Size", text).is_err(), "{text}");
        }
    }

    #[test]
    fn times() {
        for (text, ns) in [
            ("0", 0),
            ("0.000000", 0),
            ("0.000380", 380_000),
            ("12.5", 12_500_000_000),
            ("1.0000000019", 1_000_000_001),
            ("1700000000.123456", 1_700_000_000_123_456_000),
            ("1e-05", 10_000),
        ] {
            assert_eq!(time(text), Ok(Time::Elapsed(ns)), "{text}");
        }
        for (text, ns) in [
            ("00:00:00:000000", 0),
            ("00:00:00:000001", 1_000),
            ("00:00:01:5", 1_000_005_000),
            ("23:59:59:999999", 86_399_999_999_000),
            ("10:22:33.250000", 37_353_250_000_000),
            ("1:02:03", 3_723_000_000_000),
        ] {
            assert_eq!(time(text), Ok(Time::Clock(ns)), "{text}");
        }
        for text in [
            "",
            ".",
            "1.",
            ".5",
            "-1",
            "+1",
            "abc",
            "nan",
            "inf",
            "1e400",
            "18446744074",
            "24:00:00:000000",
            "00:60:00:000000",
            "00:00:61:000000",
            "00:00:00:1000000",
            "00:00",
            "00:00:00:",
            "00:00:00:0:0",
            "::",
            "00:00:-1:0",
            "123:00:00:0",
        ] {
            assert!(time(text).is_err(), "{text}");
        }
    }

    #[test]
    fn messages_show_a_field_without_trusting_it() {
        assert_eq!(shown("a\tb\u{1b}["), "'a\\tb\\u{1b}['");
        assert_eq!(shown(&"x".repeat(1000)).chars().count(), 43);
    }
}

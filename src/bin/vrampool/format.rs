//! Numbers as people read them.

use std::time::Duration;

/// A count with its thousands apart: 18,031.
pub(crate) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A time in the unit that suits it: 1.23 s, 45.6 ms, 780 µs.
pub(crate) fn time(time: Duration) -> String {
    let ns = time.as_nanos() as f64;
    let (value, unit) = match ns {
        0.0 => return "0".to_owned(),
        ..1e3 => (ns, "ns"),
        ..1e6 => (ns / 1e3, "µs"),
        ..1e9 => (ns / 1e6, "ms"),
        _ => (ns / 1e9, "s"),
    };
    let decimals = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    format!("{value:.decimals$} {unit}")
}

/// Nanoseconds per event.
pub(crate) fn nanoseconds(ns: f64) -> String {
    format!("{ns:.0} ns")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts() {
        for (value, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (18_031, "18,031"), (1_046_849, "1,046,849")] {
            assert_eq!(count(value), text);
        }
    }

    #[test]
    fn times() {
        for (ns, text) in [
            (0, "0"),
            (7, "7.00 ns"),
            (45_600, "45.6 µs"),
            (780_000, "780 µs"),
            (9_999_000, "10.0 ms"),
            (1_234_567_890, "1.23 s"),
            (4_321_000_000_000, "4321 s"),
        ] {
            assert_eq!(time(Duration::from_nanos(ns)), text);
        }
    }
}

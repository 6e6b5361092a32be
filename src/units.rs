//! Addresses and sizes: newtypes, named constants, checked arithmetic, and sizes as people write them.

use std::fmt;
use std::time::Duration;

/// 1 KiB in bytes.
pub const KIB: u64 = 1 << 10;
/// 1 MiB in bytes.
pub const MIB: u64 = 1 << 20;
/// 1 GiB in bytes.
pub const GIB: u64 = 1 << 30;

/// The alignment of every allocation, in bytes.
pub const MIN_ALIGNMENT: u64 = 256;

/// An address in a device's address space (`CUdeviceptr`), or of pinned or managed host memory.
///
/// It is a number, not a pointer: the host cannot read device memory through it. [`DevicePtr::NULL`] is the address of
/// every allocation of zero bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct DevicePtr(u64);

impl DevicePtr {
    /// The null address.
    pub const NULL: Self = Self(0);

    /// The address with this numerical value.
    #[must_use]
    pub const fn new(address: u64) -> Self {
        Self(address)
    }

    /// The numerical value, in bytes from address zero.
    #[must_use]
    pub const fn address(self) -> u64 {
        self.0
    }

    /// Whether this is the null address.
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address `bytes` further on.
    ///
    /// # Panics
    /// When the sum does not fit 64 bits, in builds with overflow checks.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }

    /// Whether the address is a multiple of `alignment`, a power of two in bytes.
    #[must_use]
    pub const fn is_aligned_to(self, alignment: u64) -> bool {
        self.0 & (alignment - 1) == 0
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::LowerHex for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::LowerHex::fmt(&self.0, f)
    }
}

/// A device's ordinal, as the driver numbers devices (`CUdevice`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct DeviceId(pub u32);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// `value` rounded up to a multiple of `alignment` (a power of two), or `None` where that does not fit 64 bits.
#[must_use]
pub(crate) const fn checked_align_up(value: u64, alignment: u64) -> Option<u64> {
    match value.checked_add(alignment - 1) {
        Some(sum) => Some(sum & !(alignment - 1)),
        None => None,
    }
}

/// `value` rounded down to a multiple of `alignment` (a power of two).
#[must_use]
pub(crate) const fn align_down(value: u64, alignment: u64) -> u64 {
    value & !(alignment - 1)
}

/// A number of bytes that prints as people read it: `17 B`, `1.5 KiB`, `140 GiB`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < KIB {
            return f.pad(&format!("{} B", self.0));
        }
        let order = (63 - self.0.leading_zeros()) / 10;
        let value = self.0 as f64 / (1u64 << (10 * order)) as f64;
        let text = format!("{value:.2}");
        let text = text.trim_end_matches('0').trim_end_matches('.');
        f.pad(&format!("{text} {}", UNITS[order as usize - 1]))
    }
}

/// Reads a size: whole bytes (`4096`), or a number with a binary unit (`8GiB`, `512MiB`, `1.5KiB`, `64 KiB`).
///
/// Units are `B`, `KiB`, `MiB`, `GiB`, `TiB`, in any case. Decimal units (`MB`) are refused, since allocators disagree on
/// what they mean.
///
/// # Errors
/// A sentence that says what is wrong with `text`: no number, an unknown unit, a fraction of a byte, or a size that does
/// not fit 64 bits.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "kib" => 10,
        "mib" => 20,
        "gib" => 30,
        "tib" => 40,
        other => return Err(format!("size '{text}': unknown unit '{other}' (B, KiB, MiB, GiB or TiB)")),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let malformed = || format!("size '{text}' is not a number with an optional unit, such as 4096, 512MiB or 8GiB");
    if whole.is_empty() || fraction.contains('.') || (fraction.is_empty() && number.contains('.')) {
        return Err(malformed());
    }
    let too_large = || format!("size '{text}' does not fit 64 bits");
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let bytes = whole.checked_mul(1 << shift).ok_or_else(too_large)?;
    if fraction.is_empty() {
        return Ok(bytes);
    }
    // The fraction is digits / 10^n of the unit, and must be whole bytes.
    if fraction.len() > 12 {
        return Err(format!("size '{text}' has too many decimals"));
    }
    let scale = 10u128.pow(fraction.len() as u32);
    let digits: u128 = fraction.parse().map_err(|_| malformed())?;
    let part = digits << shift;
    if !part.is_multiple_of(scale) {
        return Err(format!("size '{text}' is not a whole number of bytes"));
    }
    bytes.checked_add((part / scale) as u64).ok_or_else(too_large)
}

/// The units of time, each in nanoseconds, longest first.
const TIME_UNITS: [(&str, u128); 4] = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1000), ("ns", 1)];

/// Reads a time: a whole number with a unit, `s`, `ms`, `us` or `ns`, such as `10s` or `500us`.
///
/// # Errors
/// A sentence that says what is wrong with `text`: no number, no unit or an unknown one, or a time that does not fit a
/// [`Duration`].
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let known = TIME_UNITS.iter().find(|(name, _)| *name == unit.trim());
    let (Some((_, unit_ns)), false) = (known, number.is_empty()) else {
        return Err(format!("time '{text}' is not a whole number with a unit, such as 10s, 1ms or 500us"));
    };
    let too_long = || format!("time '{text}' is longer than any there is");
    let nanoseconds = number.parse::<u128>().ok().and_then(|number| number.checked_mul(*unit_ns)).ok_or_else(too_long)?;
    let seconds = u64::try_from(nanoseconds / 1_000_000_000).map_err(|_| too_long())?;
    Ok(Duration::new(seconds, (nanoseconds % 1_000_000_000) as u32))
}

/// A time in the form that [`parse_duration`] reads, in the longest unit of which it is a whole number.
pub(crate) fn duration_text(duration: Duration) -> String {
    let nanoseconds = duration.as_nanos();
    let whole = TIME_UNITS.iter().find(|(_, unit_ns)| nanoseconds.is_multiple_of(*unit_ns));
    whole.map_or_else(String::new, |(unit, unit_ns)| format!("{}{unit}", nanoseconds / unit_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_print_as_people_read_them() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (140 * GIB, "140 GiB"), (u64::MAX, "16 EiB")]
        {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [
            ("4096", 4096),
            ("0", 0),
            ("1b", 1),
            ("512MiB", 512 * MIB),
            ("8GiB", 8 * GIB),
            (" 8 gib ", 8 * GIB),
            ("1.5KiB", 1536),
            ("0.25GiB", 256 * MIB),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn bad_sizes_are_refused() {
        for text in [
            "",
            "GiB",
            "8GB",
            "-1",
            "1e9",
            "1.2.3MiB",
            "1.",
            ".5GiB",
            "0.3B",
            "0.1KiB",
            "18446744073709551616",
            "16777216TiB",
            "0x10",
            "1.0000000000001GiB",
        ] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_read_and_written() {
        for (text, time) in [
            ("10s", Duration::from_secs(10)),
            ("1ms", Duration::from_millis(1)),
            ("500us", Duration::from_micros(500)),
            ("0s", Duration::ZERO),
            ("7ns", Duration::from_nanos(7)),
            ("1000000001ns", Duration::new(1, 1)),
            ("18446744073709551615s", Duration::from_secs(u64::MAX)),
            ("18446744073709551615999999999ns", Duration::MAX),
        ] {
            assert_eq!((parse_duration(text), duration_text(time)), (Ok(time), text.to_owned()));
        }
        assert_eq!(parse_duration(" 3 s "), Ok(Duration::from_secs(3)));
        assert_eq!(duration_text(Duration::from_millis(2000)), "2s");
        let long = "340282366920938463463374607431768211456s";
        for text in ["", "s", "10", "1.5s", "-1s", "1m", "1 S", "1sec", "0x1s", "18446744073709551616s", long] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn rounding_up_near_the_top_is_refused() {
        assert_eq!(checked_align_up(u64::MAX - 4095, 4096), Some(u64::MAX - 4095));
        assert_eq!(checked_align_up(u64::MAX - 4094, 4096), None);
        assert_eq!(checked_align_up(0, 256), Some(0));
        assert_eq!(checked_align_up(1, 1), Some(1));
        assert_eq!(align_down(4097, 4096), 4096);
    }
}

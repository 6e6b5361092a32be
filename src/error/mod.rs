//! The crate's one error type, and the driver's result codes.

mod code;

pub use code::CuResult;

use crate::units::{Bytes, DeviceId, DevicePtr};
use std::fmt;

/// What a fallible operation of the pool returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed. An operation that fails leaves the pool as it was.
///
/// Ask the predicates what kind of failure it is: [`is_out_of_memory`](Self::is_out_of_memory),
/// [`is_invalid_argument`](Self::is_invalid_argument), [`is_driver`](Self::is_driver),
/// [`is_unavailable`](Self::is_unavailable). Exactly one holds.
#[derive(Clone)]
pub struct Error(Box<Kind>);

#[derive(Clone, Debug)]
enum Kind {
    OutOfMemory(OutOfMemory),
    InvalidArgument(String),
    InvalidFree { address: DevicePtr, why: InvalidFree },
    Driver { call: &'static str, code: CuResult },
    Unavailable(String),
}

/// The numbers of a request that could not be served, all in bytes.
///
/// `live + idle + committed` need not add up to `reserved`: slots of slabs that are partly in use belong to none of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// The bytes asked for.
    pub requested: u64,
    /// The same, rounded up as the pool would have served it.
    pub rounded: u64,
    /// The alignment asked for.
    pub alignment: u64,
    /// Whether it was asked for on one handle. A stretch of free bytes may lie on several.
    pub contiguous: bool,
    /// The bytes that were left of the [reservation](crate::Reservation) that it was asked of; `None` where it was asked of the
    /// pool. Nothing else serves such a request.
    pub left_of_reservation: Option<u64>,
    /// The bytes of the live block that was to grow in place; `None` where a new one was asked for.
    pub growing_from: Option<u64>,
    /// Bytes of live blocks, rounded.
    pub live: u64,
    /// Bytes mapped and free.
    pub idle: u64,
    /// The longest stretch among them.
    pub largest_free: u64,
    /// Bytes that are left of reservations.
    pub committed: u64,
    /// Bytes held from the driver.
    pub reserved: u64,
    /// The most that the pool may hold, or `None` where only the device's memory limits it.
    pub capacity: Option<u64>,
    /// The device.
    pub device: DeviceId,
    /// The driver's code, where the driver refused memory; `None` where the pool's own limit was reached.
    pub code: Option<CuResult>,
    /// The bytes that the driver had free when it refused, by its own word; `None` where it was not asked. Where that is
    /// enough for the request, something else has run out: handles, or addresses.
    pub driver_free: Option<u64>,
}

/// Why an address could not be freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum InvalidFree {
    /// No memory of this pool is there.
    Foreign,
    /// The address lies in a live block but is not its start.
    Interior,
    /// The address is in the pool's memory, and no live block is there: freed already, or never allocated.
    NotLive,
    /// The block was freed and its address allocated again since.
    Stale,
}

impl Error {
    pub(crate) fn out_of_memory(numbers: OutOfMemory) -> Self {
        Self(Box::new(Kind::OutOfMemory(numbers)))
    }

    pub(crate) fn invalid_argument(message: impl Into<String>) -> Self {
        Self(Box::new(Kind::InvalidArgument(message.into())))
    }

    pub(crate) fn invalid_free(address: DevicePtr, why: InvalidFree) -> Self {
        Self(Box::new(Kind::InvalidFree { address, why }))
    }

    pub(crate) fn driver(call: &'static str, code: CuResult) -> Self {
        Self(Box::new(Kind::Driver { call, code }))
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self(Box::new(Kind::Unavailable(message.into())))
    }

    /// Whether no memory could be had for the request. [`Error::numbers`] says how much there is.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(*self.0, Kind::OutOfMemory(_))
    }

    /// Whether the caller passed something unusable: a size, an alignment, an option, an address that cannot be freed.
    #[must_use]
    pub fn is_invalid_argument(&self) -> bool {
        matches!(*self.0, Kind::InvalidArgument(_) | Kind::InvalidFree { .. })
    }

    /// Whether a call to the driver failed for another reason than lack of memory. [`Error::code`] is the driver's
    /// code; it may come from earlier asynchronous work.
    #[must_use]
    pub fn is_driver(&self) -> bool {
        matches!(*self.0, Kind::Driver { .. })
    }

    /// Whether what was asked for is not there: no device, no driver, or a capability that the device lacks.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        matches!(*self.0, Kind::Unavailable(_))
    }

    /// Why an address could not be freed; `None` for every other error.
    #[must_use]
    pub fn invalid_free_reason(&self) -> Option<InvalidFree> {
        match *self.0 {
            Kind::InvalidFree { why, .. } => Some(why),
            _ => None,
        }
    }

    /// The numbers of an out-of-memory error; `None` for every other error.
    #[must_use]
    pub fn numbers(&self) -> Option<&OutOfMemory> {
        match &*self.0 {
            Kind::OutOfMemory(numbers) => Some(numbers),
            _ => None,
        }
    }

    /// The driver's code, where the driver refused.
    #[must_use]
    pub fn code(&self) -> Option<CuResult> {
        match &*self.0 {
            Kind::OutOfMemory(numbers) => numbers.code,
            Kind::Driver { code, .. } => Some(*code),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Kind::OutOfMemory(n) => n.fmt(f),
            Kind::InvalidArgument(message) | Kind::Unavailable(message) => f.write_str(message),
            Kind::InvalidFree { address, why } => {
                let why = match why {
                    InvalidFree::Foreign => "no memory of this pool is there",
                    InvalidFree::Interior => "it lies inside a live block and is not its start",
                    InvalidFree::NotLive => "no live block is there (freed already, or never allocated)",
                    InvalidFree::Stale => "the block was freed before, and the address allocated again",
                };
                write!(f, "cannot free {address}: {why}")
            }
            Kind::Driver { call, code } => write!(f, "{call} failed with {code}, which may come from earlier asynchronous work"),
        }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of memory on device {}: {} asked for", self.device, Bytes(self.requested))?;
        if self.rounded != self.requested {
            write!(f, " ({} rounded)", Bytes(self.rounded))?;
        }
        if self.alignment > crate::units::MIN_ALIGNMENT {
            write!(f, ", aligned to {}", Bytes(self.alignment))?;
        }
        if self.contiguous {
            f.write_str(", on one handle")?;
        }
        if let Some(left) = self.left_of_reservation {
            return write!(f, ", of a reservation with {} left", Bytes(left));
        }
        if let Some(bytes) = self.growing_from {
            write!(f, ", for a block of {} to grow in place", Bytes(bytes))?;
        }
        write!(
            f,
            "; {} live, {} held from the driver, {} of it free (longest stretch {})",
            Bytes(self.live),
            Bytes(self.reserved),
            Bytes(self.idle),
            Bytes(self.largest_free)
        )?;
        if self.committed > 0 {
            write!(f, ", {} set aside by reservations", Bytes(self.committed))?;
        }
        match self.capacity {
            Some(capacity) => write!(f, ", of at most {}", Bytes(capacity))?,
            None => f.write_str(", no limit set")?,
        }
        let needed = self.rounded.saturating_sub(self.growing_from.unwrap_or_default());
        match (self.code, self.driver_free) {
            (Some(code), Some(free)) if free >= needed => {
                write!(f, "; the driver refused more with {code}, though it has {} free: handles or addresses ran out", Bytes(free))
            }
            (Some(code), Some(free)) => write!(f, "; the driver refused more with {code}, having {} free", Bytes(free)),
            (Some(code), None) => write!(f, "; the driver refused more with {code}"),
            (None, _) => f.write_str("; the pool's limit is reached"),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({self})")
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &*self.0 {
            Kind::OutOfMemory(OutOfMemory { code: Some(code), .. }) | Kind::Driver { code, .. } => Some(code),
            _ => None,
        }
    }
}

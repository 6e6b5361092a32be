//! A request, checked and routed: which class, or how many grains.

use crate::arena::{GRAIN_BYTES, MAX_GRAINS};
use crate::buddy::{Run, Shape};
use crate::error::{Error, Result};
use crate::slab::Class;
use crate::units::{Bytes, GIB, MIN_ALIGNMENT, checked_align_up};

/// The largest alignment, in bytes.
pub(super) const MAX_ALIGNMENT: u64 = GIB;
/// The largest request that any pool could serve, in bytes.
const MAX_REQUEST_BYTES: u64 = MAX_GRAINS as u64 * GRAIN_BYTES;

/// Who serves a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Route {
    /// A slot of this class.
    Slab(Class),
    /// A run of grains.
    Run,
    /// A run of grains that blocks are to be drawn from.
    Reservation,
    /// The grains behind a live block of grains, to make it longer: the block's index and the serial of its allocation.
    Extension(u32, u32),
}

/// A request for one block, a reservation, or more of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Request {
    /// Bytes asked for, at least one. For more of a block, what it is to have then.
    pub(super) size: u64,
    pub(super) alignment: u64,
    pub(super) route: Route,
    /// The run that is taken from the buddy layer when it comes to that: a slab, or the block itself.
    pub(super) shape: Shape,
}

impl Request {
    /// Checks and routes a request of `size` bytes (at least one). No allocation is aligned to less than `floor`.
    ///
    /// # Errors
    /// An invalid argument: an alignment that is no power of two or over 1 GiB, or a size that no pool could serve.
    pub(super) fn new(size: u64, alignment: u64, floor: u64) -> Result<Self> {
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            return Err(Error::invalid_argument(format!(
                "an alignment of {alignment} bytes is not a power of two from 1 to {}",
                Bytes(MAX_ALIGNMENT)
            )));
        }
        let alignment = alignment.max(floor);
        if let Some(class) = Class::of(size, alignment) {
            let shape = Shape { grains: class.slab_grains(), alignment: GRAIN_BYTES, one_handle: false, at: None };
            return Ok(Self { size, alignment, route: Route::Slab(class), shape });
        }
        let shape = Shape { grains: grains(size)?, alignment, one_handle: false, at: None };
        Ok(Self { size, alignment, route: Route::Run, shape })
    }

    /// The request as a run of its own, where a slab cannot be had.
    pub(super) fn without_slab(self) -> Self {
        if !matches!(self.route, Route::Slab(_)) {
            return self;
        }
        let grains = self.size.div_ceil(GRAIN_BYTES) as u32;
        Self { route: Route::Run, shape: Shape { grains, alignment: self.alignment, ..self.shape }, ..self }
    }

    /// The request for a run that blocks are to be drawn from.
    pub(super) fn as_reservation(self) -> Self {
        Self { route: Route::Reservation, ..self.without_slab() }
    }

    /// A request for the run behind a live block of grains, which then has `size` bytes.
    pub(super) fn extension(block: u32, serial: u32, behind: Run, size: u64) -> Self {
        let shape = Shape { grains: behind.len, alignment: GRAIN_BYTES, one_handle: false, at: Some(behind.start) };
        Self { size, alignment: MIN_ALIGNMENT, route: Route::Extension(block, serial), shape }
    }

    /// The request for a block on one handle: a run of its own, since a slab may lie on two.
    pub(super) fn on_one_handle(self) -> Self {
        let run = self.without_slab();
        Self { shape: Shape { one_handle: true, ..run.shape }, ..run }
    }

    /// What the block takes up, or how much longer it becomes, in bytes.
    pub(super) fn block_bytes(&self) -> u64 {
        match self.route {
            Route::Slab(class) => class.slot_bytes(),
            Route::Run | Route::Reservation | Route::Extension(..) => u64::from(self.shape.grains) * GRAIN_BYTES,
        }
    }
}

/// The grains that hold `size` bytes.
///
/// # Errors
/// An invalid argument: more than any pool could serve.
pub(super) fn grains(size: u64) -> Result<u32> {
    let too_large = || Error::invalid_argument(format!("{size} bytes are more than any pool can serve ({})", Bytes(MAX_REQUEST_BYTES)));
    let rounded = checked_align_up(size, GRAIN_BYTES).filter(|&rounded| rounded <= MAX_REQUEST_BYTES).ok_or_else(too_large)?;
    Ok((rounded / GRAIN_BYTES) as u32)
}

const _: () = assert!(MIN_ALIGNMENT.is_power_of_two() && GRAIN_BYTES.is_multiple_of(MIN_ALIGNMENT));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::MAX_SLOT_BYTES;
    use crate::units::{KIB, MIB};

    #[test]
    fn every_size_to_a_mebibyte_is_routed_to_what_holds_it() {
        for size in 1..=MIB {
            let request = Request::new(size, 1, MIN_ALIGNMENT).unwrap();
            let block = request.block_bytes();
            assert!(block >= size && block.is_multiple_of(256), "{size}");
            assert_eq!(matches!(request.route, Route::Slab(_)), size <= MAX_SLOT_BYTES, "{size}");
            let lost_limit = if size <= MAX_SLOT_BYTES { 255.max(size / 4) } else { GRAIN_BYTES - 1 };
            assert!(block - size <= lost_limit, "{size} loses {}", block - size);
        }
    }

    #[test]
    fn sizes_near_the_top_are_refused_not_wrapped() {
        let hopeless = (45..64).flat_map(|k| [(1u64 << k) + 1, 1 << k.min(63)]).filter(|&size| size > MAX_REQUEST_BYTES);
        let top =
            [u64::MAX, u64::MAX - 1, u64::MAX - 255, u64::MAX - 256, u64::MAX - 511, u64::MAX - 512, u64::MAX - 4095, u64::MAX - 16383];
        for size in hopeless.chain(top) {
            for alignment in [1, 256, 2 * MIB] {
                assert!(Request::new(size, alignment, MIN_ALIGNMENT).unwrap_err().is_invalid_argument(), "{size}");
            }
        }
        assert!(Request::new(MAX_REQUEST_BYTES, 1, MIN_ALIGNMENT).is_ok());
        assert!(Request::new(MAX_REQUEST_BYTES + 1, 1, MIN_ALIGNMENT).is_err());
    }

    #[test]
    fn alignments_are_checked() {
        for alignment in [0, 3, 96, GIB + 1, 2 * GIB, 1 << 63, u64::MAX] {
            assert!(Request::new(1, alignment, MIN_ALIGNMENT).unwrap_err().is_invalid_argument(), "{alignment}");
        }
        // A small alignment asks for no more than the size does.
        for alignment in [1, 2, 4, 8, 16, 32, 64, 128, 256] {
            for size in [1, 31, 32, 255, 256, 257] {
                let request = Request::new(size, alignment, MIN_ALIGNMENT).unwrap();
                assert_eq!(request.block_bytes(), size.next_multiple_of(256));
            }
        }
        assert_eq!(
            Request::new(1, 32 * KIB, MIN_ALIGNMENT).unwrap().shape,
            Shape { grains: 1, alignment: 32 * KIB, one_handle: false, at: None }
        );
        assert_eq!(Request::new(257, 1, 512).unwrap().block_bytes(), 512);
    }
}

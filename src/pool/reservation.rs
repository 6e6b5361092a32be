//! Memory set aside, for blocks that must not fail later.
//!
//! A reservation is one run of grains, and blocks are cut from its front. A quota would be a promise of so many bytes only: the
//! free memory could be in pieces, none of them long enough, by the time they are asked for.

use super::core::{Core, Served};
use super::request::Request;
use super::{DeviceBuffer, Pool, Shared};
use crate::arena::GRAIN_BYTES;
use crate::buddy::Run;
use crate::error::{Error, OutOfMemory, Result};
use crate::units::{DevicePtr, MIN_ALIGNMENT};

/// Memory of a pool that is set aside: one stretch of it, mapped, that nothing but this serves. Blocks are drawn from its front
/// and cannot fail while enough of it [remains](Self::remaining); no draw calls the driver.
///
/// A block that was drawn is a block of the pool like any other. It may outlive the reservation, and when it is freed, by its
/// [`DeviceBuffer`] or by [`Pool::deallocate`], its memory goes to the pool and not back to the reservation. What was not drawn
/// goes to the pool when the reservation is dropped. It keeps the pool's memory alive, and threads may share it.
///
/// Every block takes up a multiple of 16 KiB here, small ones too.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// use vrampool::{Device, Pool};
///
/// let pool = Pool::builder().device(Device::simulated()).build()?;
/// let reservation = pool.reserve(1 << 30)?;
/// // Whatever others allocate in the meantime:
/// let weights = reservation.allocate_buffer(600 << 20)?;
/// assert_eq!(reservation.remaining(), 424 << 20);
/// drop(reservation);
/// assert_eq!(pool.statistics().live_bytes, weights.size());
/// # }
/// # Ok::<(), vrampool::Error>(())
/// ```
#[derive(Debug)]
pub struct Reservation {
    pool: Pool,
    index: u32,
}

impl Pool {
    /// Sets at least `bytes` bytes aside: a whole number of 16 KiB, in one stretch, taken from free memory or from the driver
    /// as for one block of that size. Zero bytes are a reservation from which nothing but blocks of zero bytes can be drawn.
    ///
    /// Blocks that are to be aligned to more than 16 KiB may leave gaps, for which `bytes` must have room: less than the
    /// alignment for each.
    ///
    /// # Errors
    /// As [`Pool::allocate`].
    ///
    /// # Complexity
    /// As [`Pool::allocate`].
    pub fn reserve(&self, bytes: u64) -> Result<Reservation> {
        Ok(Reservation { pool: self.clone(), index: self.shared.reserve(bytes)? })
    }
}

impl Reservation {
    /// Draws a block of at least `size` bytes at a multiple of 256 (or of the pool's own
    /// [alignment](crate::PoolBuilder::alignment)). It takes up `size` rounded up to 16 KiB. A size of 0 gives
    /// [`DevicePtr::NULL`].
    ///
    /// # Errors
    /// - [`Error::is_out_of_memory`]: more than what remains. Nothing is taken elsewhere, and the pool's callback for a lack
    ///   of memory is not asked; [`OutOfMemory::left_of_reservation`] says how much remains.
    /// - [`Error::is_invalid_argument`]: no pool could serve this size.
    /// - [`Error::is_driver`]: the driver has ended, as in a forked child.
    ///
    /// # Complexity
    /// O(1), and no driver call.
    pub fn allocate(&self, size: u64) -> Result<DevicePtr> {
        self.allocate_aligned(size, MIN_ALIGNMENT)
    }

    /// Draws a block of at least `size` bytes at a multiple of `alignment` bytes: a power of two, 1 GiB at the most. What is
    /// skipped for the alignment goes to the pool, and [remains](Self::remaining) no longer.
    ///
    /// # Errors
    /// As [`Reservation::allocate`]; [`Error::is_invalid_argument`] also for an alignment that is not such a power of two.
    ///
    /// # Complexity
    /// As [`Reservation::allocate`]; O(log n) of the memory held where something is skipped.
    pub fn allocate_aligned(&self, size: u64, alignment: u64) -> Result<DevicePtr> {
        Ok(self.draw(size, alignment)?.address)
    }

    /// Draws a block that frees itself. As [`Reservation::allocate`].
    ///
    /// # Errors
    /// As [`Reservation::allocate`].
    pub fn allocate_buffer(&self, size: u64) -> Result<DeviceBuffer> {
        self.allocate_buffer_aligned(size, MIN_ALIGNMENT)
    }

    /// Draws a block that frees itself. As [`Reservation::allocate_aligned`].
    ///
    /// # Errors
    /// As [`Reservation::allocate_aligned`].
    pub fn allocate_buffer_aligned(&self, size: u64, alignment: u64) -> Result<DeviceBuffer> {
        let served = self.draw(size, alignment)?;
        Ok(DeviceBuffer::new(self.pool.clone(), served.address, size, served.serial))
    }

    /// The bytes that are left, a multiple of 16 KiB. Zero where the driver has ended.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        if self.pool.shared.has_ended() { 0 } else { self.pool.shared.core.lock().left_of(self.index) }
    }

    /// The pool that the memory belongs to.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    fn draw(&self, size: u64, alignment: u64) -> Result<Served> {
        let shared = &self.pool.shared;
        // Of zero bytes only the alignment is checked.
        let request = Request::new(size.max(1), alignment, shared.options.alignment);
        if size == 0 {
            return request.map(|_| Served { address: DevicePtr::NULL, serial: 0 });
        }
        shared.alive()?;
        let drawn = request.and_then(|request| shared.core.lock().draw(self.index, &request.without_slab()));
        shared.counted(drawn)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let shared = &self.pool.shared;
        if !shared.has_ended() {
            let mut core = shared.core.lock();
            core.end_reservation(self.index);
            shared.give_back_excess(core);
            shared.decay_by_the_way();
        }
    }
}

impl Shared {
    /// Sets memory aside, and returns the reservation's index.
    fn reserve(&self, bytes: u64) -> Result<u32> {
        if bytes == 0 {
            self.alive()?;
            return Ok(self.core.lock().reservations.insert(Run::default()));
        }
        Ok(self.serve(|| Ok(Request::new(bytes, MIN_ALIGNMENT, self.options.alignment)?.as_reservation()))?.serial)
    }
}

impl Core {
    /// Cuts a block from the front of a reservation. What lies before the first aligned address becomes free.
    ///
    /// # Errors
    /// Out of memory: too little is left.
    fn draw(&mut self, index: u32, request: &Request) -> Result<Served> {
        let rest = self.reservations.get(index).copied().unwrap_or_default();
        let grains = request.shape.grains;
        let start = if grains <= rest.len { self.buddy.arena.align_up(rest.start, request.alignment) } else { None };
        let served = start.filter(|&start| start < rest.end() && grains <= rest.end() - start).and_then(|start| {
            let run = Run { start, len: grains };
            if start > rest.start {
                self.buddy.give(Run { start: rest.start, len: start - rest.start });
            }
            if let Some(left) = self.reservations.get_mut(index)
                && !cfg!(vrampool_fault = "draw_leaves_all")
            {
                *left = Run { start: run.end(), len: rest.end() - run.end() };
            }
            self.accept(run, request)
        });
        served.ok_or_else(|| {
            let numbers = self.out_of_memory(request, None, None);
            Error::out_of_memory(OutOfMemory { left_of_reservation: Some(self.left_of(index)), ..numbers })
        })
    }

    fn end_reservation(&mut self, index: u32) {
        if let Some(rest) = self.reservations.remove(index).filter(|rest| !rest.is_empty()) {
            self.buddy.give(rest);
        }
    }

    /// The bytes that are left of a reservation.
    fn left_of(&self, index: u32) -> u64 {
        self.reservations.get(index).map_or(0, |rest| u64::from(rest.len) * GRAIN_BYTES)
    }

    /// The bytes that are left of all reservations.
    pub(super) fn committed_bytes(&self) -> u64 {
        self.reservations.iter().map(|(_, rest)| u64::from(rest.len) * GRAIN_BYTES).sum()
    }

    /// Whether a grain lies in what is left of a reservation.
    pub(super) fn is_committed(&self, grain: u32) -> bool {
        self.reservations.iter().any(|(_, rest)| rest.contains(grain))
    }
}

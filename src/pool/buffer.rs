//! A block that frees itself.

use super::Pool;
use crate::error::{Error, Result};
use crate::units::DevicePtr;
use std::fmt;

/// A block of a pool, freed when it is dropped. It keeps the pool's memory alive.
///
/// It knows its own allocation: where the block was freed by its address and given to someone else, dropping the buffer
/// leaves the new owner alone, and [`DeviceBuffer::free`] says so.
#[derive(Debug)]
pub struct DeviceBuffer {
    pool: Pool,
    address: DevicePtr,
    size: u64,
    serial: u32,
    /// Whether a free of it was refused, and told to whoever asked: nothing is left to free.
    is_stale: bool,
}

impl DeviceBuffer {
    pub(super) fn new(pool: Pool, address: DevicePtr, size: u64, serial: u32) -> Self {
        Self { pool, address, size, serial, is_stale: false }
    }

    /// Where the block begins; [`DevicePtr::NULL`] for a buffer of zero bytes.
    #[must_use]
    pub fn address(&self) -> DevicePtr {
        self.address
    }

    /// The bytes asked for.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The pool that the block belongs to.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Makes the block longer where it is, as [`Pool::try_grow`]: `true`, and [`size`](Self::size) is at least `size` then;
    /// `false` where it cannot grow there, and nothing has changed.
    ///
    /// # Errors
    /// As [`Pool::try_grow`]; [`Error::is_invalid_argument`], with [`Error::invalid_free_reason`], where the block was freed by
    /// its address.
    ///
    /// # Complexity
    /// As [`Pool::try_grow`].
    pub fn try_grow(&mut self, size: u64) -> Result<bool> {
        let grown = if self.address.is_null() { size == 0 } else { self.pool.shared.try_grow(self.address, Some(self.serial), size)? };
        if grown {
            self.size = self.size.max(size);
        }
        Ok(grown)
    }

    /// Frees the block, as dropping the buffer does, and says whether that worked.
    ///
    /// # Errors
    /// [`FreeError`], with the buffer: its block is not live any more.
    pub fn free(mut self) -> Result<(), FreeError> {
        match self.release() {
            Ok(()) => {
                self.address = DevicePtr::NULL;
                Ok(())
            }
            Err(error) => {
                self.is_stale = true;
                Err(FreeError { error, buffer: self })
            }
        }
    }

    /// Gives the block up without freeing it: [`DeviceBuffer::from_raw`] takes it over again, [`Pool::deallocate`] frees it,
    /// or it lives as long as the pool, which it does not keep alive any more.
    #[must_use = "the block is freed by nobody else"]
    pub fn into_raw(mut self) -> DevicePtr {
        std::mem::take(&mut self.address)
    }

    /// Takes over a block of the pool that nobody owns, by its address: one that [`DeviceBuffer::into_raw`] gave up, or
    /// that [`Pool::allocate`] gave. Its size is what was asked for. [`DevicePtr::NULL`] is a block of zero bytes.
    ///
    /// # Safety
    /// From now on the block is the buffer's: no other buffer owns it or is made of its address, and nobody frees it by
    /// [`Pool::deallocate`]. What holds for that call when it frees holds when the buffer is dropped.
    ///
    /// # Errors
    /// [`Error::is_invalid_argument`], with [`Error::invalid_free_reason`], for an address that is not the start of a live
    /// block of this pool; [`Error::is_driver`] where the driver has ended.
    pub unsafe fn from_raw(pool: &Pool, address: DevicePtr) -> Result<Self> {
        let (size, serial) = if address.is_null() { (0, 0) } else { pool.shared.live(address)? };
        Ok(Self::new(pool.clone(), address, size, serial))
    }

    fn release(&self) -> Result<()> {
        if self.address.is_null() { Ok(()) } else { self.pool.shared.free(self.address, Some(self.serial)) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if !self.is_stale {
            // A refusal is counted, and nobody is left to tell.
            let _ = self.release();
        }
    }
}

/// A buffer that could not be freed, and why.
pub struct FreeError {
    error: Error,
    buffer: DeviceBuffer,
}

impl FreeError {
    /// Why.
    #[must_use]
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// The buffer, as it was.
    #[must_use]
    pub fn into_buffer(self) -> DeviceBuffer {
        self.buffer
    }
}

impl fmt::Debug for FreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FreeError").field("error", &self.error).field("buffer", &self.buffer).finish()
    }
}

impl fmt::Display for FreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl std::error::Error for FreeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

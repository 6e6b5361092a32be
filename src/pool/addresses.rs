//! Addresses: how many are reserved, and when.

use super::Shared;
use crate::arena::GRAIN_BYTES;
use crate::buddy::Shape;
use crate::driver::Call;
use crate::error::{CuResult, Error, Result};
use crate::units::GIB;

/// What addresses are reserved for at first, in multiples of the memory.
const ADDRESSES_PER_MEMORY: u64 = 8;
/// The most that is reserved at first, in bytes, so that a hundred pools fit in the address space of one process.
const MAX_FIRST_ADDRESSES: u64 = 512 * GIB;
/// What is reserved for a request where addresses are scarce, in multiples of the request.
const ADDRESSES_PER_REQUEST: u64 = 4;

impl Shared {
    /// Reserves addresses in which a run of this shape fits. Whether that worked.
    ///
    /// # Errors
    /// A failure that is not a refusal.
    pub(super) fn reserve_addresses(&self, shape: Shape) -> Result<bool> {
        let page_bytes = self.site.page_bytes;
        let needed = address_bytes(shape, page_bytes);
        let mut sizes = Vec::new();
        if !self.core.lock().buddy.arena.addresses_scarce() {
            let generous = self.memory_bytes.saturating_mul(ADDRESSES_PER_MEMORY).min(MAX_FIRST_ADDRESSES).max(needed);
            sizes.push(1 << generous.ilog2());
        }
        let mut modest = needed.saturating_mul(ADDRESSES_PER_REQUEST);
        while modest > needed {
            sizes.push(modest.next_multiple_of(page_bytes));
            modest /= 2;
        }
        sizes.push(needed);
        for size in sizes.into_iter().filter(|&size| size >= needed) {
            let alignment = if size.is_power_of_two() { size.min(GIB).max(page_bytes) } else { page_bytes };
            match self.site.driver.mem_address_reserve(size, alignment) {
                Ok(base) => {
                    if self.core.lock().buddy.arena.add_region(base, size).is_some() {
                        return Ok(true);
                    }
                    // The index space has no place for so many. What cannot be given back now is lost: it is only addresses.
                    let _ = self.site.driver.mem_address_free(base, size);
                }
                Err(CuResult::ERROR_OUT_OF_MEMORY | CuResult::ERROR_INVALID_VALUE | CuResult::ERROR_NOT_SUPPORTED) => {
                    self.core.lock().buddy.arena.note_addresses_scarce();
                }
                Err(code) => return Err(Error::driver(Call::MemAddressReserve.name(), code)),
            }
        }
        Ok(false)
    }
}

/// The addresses that are sure to hold a run of a shape, in bytes: whole pages, and room to align it.
pub(super) fn address_bytes(shape: Shape, page_bytes: u64) -> u64 {
    let slack = shape.alignment.saturating_sub(page_bytes);
    (u64::from(shape.grains) * GRAIN_BYTES).next_multiple_of(page_bytes) + slack
}

//! Reservations, and blocks that become longer in place.

use super::{DEVICE, Runner, shadow::Held};
use crate::driver::sim::FaultTarget;

/// What everything but slots is rounded up to, in bytes.
const GRAIN: u64 = 16 << 10;

impl Runner {
    pub(super) fn reserve(&mut self, size: u64) -> Result<(), String> {
        let (before, faults) = (self.pool.statistics(), self.faults_done());
        match self.pool.reserve(size) {
            Ok(reservation) if reservation.remaining() == size.next_multiple_of(GRAIN) => {
                self.reservations.push(reservation);
                Ok(())
            }
            Ok(reservation) => Err(format!("{} bytes were set aside for {size}", reservation.remaining())),
            Err(error) => self.judge(&error, size, 1, &before, faults),
        }
    }

    /// Draws a block: with no call of the driver, whatever it is up to, and only from the reservation.
    pub(super) fn draw(&mut self, which: u8, size: u64, alignment: u64, buffer: bool) -> Result<(), String> {
        let Some(which) = usize::from(which).checked_rem(self.reservations.len()) else { return Ok(()) };
        let reservation = &self.reservations[which];
        let (before, calls) = (reservation.remaining(), self.sim.calls(FaultTarget::MemoryCalls));
        let rounded = size.next_multiple_of(GRAIN);
        let result = if buffer {
            let buffer = reservation.allocate_buffer_aligned(size, alignment);
            buffer.map(|buffer| (buffer.address(), Held::Buffer(buffer)))
        } else {
            reservation.allocate_aligned(size, alignment).map(|address| (address, Held::Raw))
        };
        let left = reservation.remaining();
        if self.sim.calls(FaultTarget::MemoryCalls) != calls {
            return Err("drawing a block called the driver".into());
        }
        match result {
            Ok((address, held)) => {
                let skipped = before.checked_sub(rounded + left).ok_or_else(|| format!("{size} of {before} bytes leave {left}"))?;
                if skipped >= alignment.max(GRAIN) || !address.is_aligned_to(alignment.max(256)) {
                    return Err(format!("{address} is not a multiple of {alignment}, or too far on: {skipped}"));
                }
                if self.maps_pages && !self.sim.is_writable(DEVICE, address, size) {
                    return Err(format!("{size} bytes at {address} are not all mapped with access"));
                }
                self.shadow.lock().insert(address, size, held)
            }
            Err(error) => {
                let says_so = error.numbers().is_some_and(|numbers| numbers.left_of_reservation == Some(before));
                let must_fit = before >= rounded + alignment.saturating_sub(GRAIN);
                if must_fit || !says_so || left != before {
                    return Err(format!("drawing {size} of {before} bytes at {alignment}, {left} are left: {error}"));
                }
                Ok(())
            }
        }
    }

    pub(super) fn end_reservation(&mut self, which: u8) -> Result<(), String> {
        let Some(which) = usize::from(which).checked_rem(self.reservations.len()) else { return Ok(()) };
        let reservation = self.reservations.swap_remove(which);
        let (left, before) = (reservation.remaining(), self.pool.statistics());
        drop(reservation);
        let now = self.pool.statistics();
        // Above a maximum that was lowered, some of it goes on to the driver, and others may come by meanwhile.
        let stays = before.reserved_bytes <= self.limit;
        let is_right = if stays { now.free_bytes == before.free_bytes + left } else { now.reserved_bytes <= before.reserved_bytes };
        if !is_right || now.committed_bytes + left != before.committed_bytes {
            let numbers = |of: &crate::Statistics| (of.free_bytes, of.committed_bytes, of.reserved_bytes);
            return Err(format!("{left} bytes were left; free, committed, reserved: {:?}, then {:?}", numbers(&before), numbers(&now)));
        }
        Ok(())
    }

    pub(super) fn grow(&mut self, which: u16, size: u64) -> Result<(), String> {
        let Some((address, old, mut buffer)) = self.shadow.lock().lend(which) else { return Ok(()) };
        let (before, faults, planned) = (self.pool.statistics(), self.faults_done(), self.amid.lock().plans.len());
        let result = match &mut buffer {
            Some(buffer) => buffer.try_grow(size),
            None => self.pool.try_grow(address, size),
        };
        let quiet = planned == self.amid.lock().plans.len();
        if buffer.is_none() && !self.shadow.lock().is_start(address) {
            // The block was freed while the driver was at work.
            return match result {
                Err(error) if error.invalid_free_reason().is_some() || faults < self.faults_done() => Ok(()),
                other => Err(format!("a block that was freed meanwhile: {other:?}")),
            };
        }
        let grown = matches!(result, Ok(true));
        let new = if grown { old.max(size) } else { old };
        if buffer.as_ref().is_some_and(|buffer| buffer.size() != new) {
            return Err(format!("{old} bytes were to become {size}: {buffer:?}"));
        }
        self.shadow.lock().resize(address, new, buffer)?;
        if self.maps_pages && !self.sim.is_writable(DEVICE, address, new) {
            return Err(format!("{new} bytes at {address} are not all mapped with access"));
        }
        let had = if old > 64 << 10 { old.next_multiple_of(GRAIN) } else { old };
        match result {
            Ok(true) => Ok(()),
            _ if size <= had => Err(format!("{old} bytes had {size} already: {result:?}")),
            // What a fault leaves with the driver may be what is in the way.
            Ok(false) if quiet && faults == self.faults_done() && self.pool.statistics() != before => {
                Err(format!("a refusal changed {before:?}"))
            }
            Ok(false) => Ok(()),
            Err(error) => self.judge(&error, size, 1, &before, faults),
        }
    }
}

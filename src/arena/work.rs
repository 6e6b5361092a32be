//! Work for the driver, done without any lock: making and mapping memory, and giving it back.

use super::{Pages, Site};
use crate::driver::{AccessDescriptor, AccessFlags, Call, DriverResult, PhysicalHandle};
use crate::error::CuResult;
use crate::sync::Arc;
use crate::units::DevicePtr;

/// How far a piece of memory has come. Each step up is one driver call, and so is each step down.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// Nothing of the driver's is held (and, at the end of a release, nothing is left).
    Planned,
    /// Physical memory is held, mapped nowhere.
    Created(PhysicalHandle),
    /// It is mapped, without access.
    Mapped(PhysicalHandle),
    /// It is in use.
    Accessible(PhysicalHandle),
    /// A plain allocation, not made yet.
    PlannedPlain,
    /// A plain allocation at the address that the driver returned.
    Allocated(DevicePtr),
    /// A plain allocation that was freed; its region goes.
    Freed,
}

/// One physical handle, or one plain allocation, on its way up or down.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) pages: Pages,
    /// Where its first page lies; null for a plain allocation that has no place yet.
    pub(crate) address: DevicePtr,
    pub(crate) bytes: u64,
    pub(crate) stage: Stage,
}

/// The driver call that failed, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failure {
    pub(crate) call: Call,
    pub(crate) code: CuResult,
}

/// Pieces under way. It must be handed to [`Arena::settle`](super::Arena::settle), whatever came of it.
#[must_use]
#[derive(Debug)]
pub(crate) struct Work {
    site: Arc<Site>,
    pieces: Vec<Piece>,
    gives_back: bool,
}

fn step<T>(call: Call, result: DriverResult<T>) -> Result<T, Failure> {
    result.map_err(|code| Failure { call, code })
}

/// A step down. A driver that has ended, or a context that was destroyed, has taken its memory along: there is nothing left
/// to give back.
fn step_down(call: Call, result: DriverResult<()>) -> Result<(), Failure> {
    match result {
        Err(CuResult::ERROR_DEINITIALIZED | CuResult::ERROR_CONTEXT_IS_DESTROYED) => Ok(()),
        result => step(call, result),
    }
}

impl Work {
    pub(super) fn new(site: Arc<Site>, pieces: Vec<Piece>) -> Self {
        let gives_back = !pieces.iter().any(|piece| matches!(piece.stage, Stage::Planned | Stage::PlannedPlain));
        Self { site, pieces, gives_back }
    }

    /// Whether the pieces were held before, and are to go.
    pub(crate) fn gives_back(&self) -> bool {
        self.gives_back
    }

    pub(super) fn take_pieces(&mut self) -> Vec<Piece> {
        std::mem::take(&mut self.pieces)
    }

    /// Bytes in all pieces.
    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }

    /// How many handles or allocations the work is made of.
    pub(crate) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Brings every piece into use: all handles are created before the first is mapped, so that a lack of memory shows
    /// early. A failure takes back what was done; a piece that the driver will not take back stays where it is.
    ///
    /// # Errors
    /// The first failure.
    pub(crate) fn grow(&mut self) -> Result<(), Failure> {
        let result = self.grow_or_fail();
        if result.is_err() && !cfg!(vrampool_fault = "map_not_unwound") {
            // The failure that matters is the first; what cannot be taken back is tried again later.
            let _ = self.release();
        }
        result
    }

    fn grow_or_fail(&mut self) -> Result<(), Failure> {
        let Site { driver, device, kind, handle_properties, .. } = &*self.site;
        for piece in &mut self.pieces {
            match piece.stage {
                Stage::PlannedPlain => {
                    piece.stage = Stage::Allocated(step(Call::allocates(*kind), driver.mem_alloc(*device, *kind, piece.bytes))?);
                }
                Stage::Planned => {
                    let created = driver.mem_create(piece.bytes, handle_properties);
                    piece.stage = Stage::Created(step(Call::MemCreate, created)?);
                }
                _ => {}
            }
        }
        let access = [AccessDescriptor { device: *device, flags: AccessFlags::ReadWrite }];
        for piece in &mut self.pieces {
            if let Stage::Created(physical) = piece.stage {
                step(Call::MemMap, driver.mem_map(piece.address, piece.bytes, 0, physical))?;
                piece.stage = Stage::Mapped(physical);
                step(Call::MemSetAccess, driver.mem_set_access(piece.address, piece.bytes, &access))?;
                piece.stage = Stage::Accessible(physical);
            }
        }
        Ok(())
    }

    /// Gives every piece back, last first. A piece that the driver will not take back stays where it is; the others
    /// go on.
    ///
    /// # Errors
    /// The first failure.
    pub(crate) fn release(&mut self) -> Result<(), Failure> {
        let mut outcome = Ok(());
        for piece in self.pieces.iter_mut().rev() {
            outcome = outcome.and(piece.release(&self.site));
        }
        outcome
    }
}

impl Piece {
    /// Steps down as far as the driver goes along.
    fn release(&mut self, site: &Site) -> Result<(), Failure> {
        let driver = &site.driver;
        if let Stage::Mapped(physical) | Stage::Accessible(physical) = self.stage {
            step_down(Call::MemUnmap, driver.mem_unmap(self.address, self.bytes))?;
            self.stage = Stage::Created(physical);
        }
        if let Stage::Created(physical) = self.stage {
            step_down(Call::MemRelease, driver.mem_release(physical))?;
            self.stage = Stage::Planned;
        }
        if let Stage::Allocated(base) = self.stage {
            step_down(Call::frees(site.kind), driver.mem_free(site.device, site.kind, base))?;
            self.stage = if self.address.is_null() { Stage::PlannedPlain } else { Stage::Freed };
        }
        Ok(())
    }
}

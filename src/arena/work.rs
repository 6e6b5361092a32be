//! Work for the driver, done without any lock: making and mapping memory, and giving it back.

use super::{Pages, Site};
use crate::driver::{AccessDescriptor, AccessFlags, Call, DriverResult, PhysicalHandle};
use crate::error::CuResult;
use crate::sync::{Arc, is_planted};
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

/// Pages, and the address of the first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) pages: Pages,
    /// Null for a plain allocation that has no place yet.
    pub(crate) address: DevicePtr,
}

/// The other place of a piece that is moved. Its pages are taken for the piece, and nothing is mapped there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Elsewhere {
    /// The piece is not moved.
    Nowhere,
    /// It is to go there.
    Target(Place),
    /// It came from there.
    Origin(Place),
}

/// One physical handle, or one plain allocation, on its way up or down, or from one place to another.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    /// Where it is, or will be as soon as it is mapped.
    pub(crate) place: Place,
    pub(crate) elsewhere: Elsewhere,
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
        let stays = |piece: &Piece| piece.elsewhere != Elsewhere::Nowhere || matches!(piece.stage, Stage::Planned | Stage::PlannedPlain);
        let gives_back = !pieces.iter().any(stays);
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

    /// How many handles are moved.
    pub(crate) fn moves(&self) -> u64 {
        self.pieces.iter().filter(|piece| piece.elsewhere != Elsewhere::Nowhere).count() as u64
    }

    /// How many handles or allocations the work is made of.
    pub(crate) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Brings every piece into use, where it is to be. All handles are created before the first is moved or mapped, so that
    /// a lack of memory shows early and leaves everything where it was. A failure takes back what was done, and puts back
    /// what was moved; a piece that the driver will not take back stays where it is.
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
        if self.pieces.iter().any(|piece| matches!(piece.elsewhere, Elsewhere::Target(_))) {
            self.prove_idle()?;
            for piece in &mut self.pieces {
                piece.depart(&self.site)?;
            }
        }
        for piece in &mut self.pieces {
            piece.map(&self.site)?;
        }
        Ok(())
    }

    /// Waits until no work that is queued on the device can touch the pages that are about to be unmapped: once for all.
    fn prove_idle(&self) -> Result<(), Failure> {
        step(Call::ContextSynchronize, self.site.driver.context_synchronize(self.site.device))
    }

    /// Gives every piece back, last first; one that was moved goes back to where it came from. A piece that the driver will
    /// not take back stays where it is; the others go on.
    ///
    /// # Errors
    /// The first failure.
    pub(crate) fn release(&mut self) -> Result<(), Failure> {
        let mut outcome = Ok(());
        for piece in self.pieces.iter_mut().rev() {
            outcome = outcome.and(match piece.elsewhere {
                Elsewhere::Nowhere => piece.release(&self.site),
                Elsewhere::Target(_) => Ok(()),
                Elsewhere::Origin(origin) => piece.return_to(origin, &self.site),
            });
        }
        outcome
    }
}

impl Piece {
    /// Leaves its place, if it is to go elsewhere.
    fn depart(&mut self, site: &Site) -> Result<(), Failure> {
        if let (Elsewhere::Target(target), Stage::Accessible(physical)) = (self.elsewhere, self.stage) {
            step(Call::MemUnmap, site.driver.mem_unmap(self.place.address, self.bytes))?;
            self.stage = Stage::Created(physical);
            self.elsewhere = Elsewhere::Origin(std::mem::replace(&mut self.place, target));
        }
        Ok(())
    }

    /// Maps a handle that is made and sets access.
    fn map(&mut self, site: &Site) -> Result<(), Failure> {
        if let Stage::Created(physical) = self.stage {
            step(Call::MemMap, site.driver.mem_map(self.place.address, self.bytes, 0, physical))?;
            self.stage = Stage::Mapped(physical);
            if cfg!(vrampool_fault = "access_not_set") || is_planted("window_before_access") {
                self.stage = Stage::Accessible(physical);
                return Ok(());
            }
            let access = [AccessDescriptor { device: site.device, flags: AccessFlags::ReadWrite }];
            step(Call::MemSetAccess, site.driver.mem_set_access(self.place.address, self.bytes, &access))?;
            self.stage = Stage::Accessible(physical);
        }
        Ok(())
    }

    /// Goes back to where it came from. What cannot be mapped there is given back to the driver.
    fn return_to(&mut self, origin: Place, site: &Site) -> Result<(), Failure> {
        self.unmap(site)?;
        self.elsewhere = Elsewhere::Target(std::mem::replace(&mut self.place, origin));
        if cfg!(vrampool_fault = "move_not_unwound") {
            return Ok(());
        }
        self.map(site).inspect_err(|_| {
            let _ = self.release(site);
        })
    }

    fn unmap(&mut self, site: &Site) -> Result<(), Failure> {
        if let Stage::Mapped(physical) | Stage::Accessible(physical) = self.stage {
            step_down(Call::MemUnmap, site.driver.mem_unmap(self.place.address, self.bytes))?;
            self.stage = Stage::Created(physical);
        }
        Ok(())
    }

    /// Steps down as far as the driver goes along.
    fn release(&mut self, site: &Site) -> Result<(), Failure> {
        let driver = &site.driver;
        self.unmap(site)?;
        if let Stage::Created(physical) = self.stage {
            step_down(Call::MemRelease, driver.mem_release(physical))?;
            self.stage = Stage::Planned;
        }
        if let Stage::Allocated(base) = self.stage {
            step_down(Call::frees(site.kind), driver.mem_free(site.device, site.kind, base))?;
            self.stage = if self.place.address.is_null() { Stage::PlannedPlain } else { Stage::Freed };
        }
        Ok(())
    }
}

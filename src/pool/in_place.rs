//! Blocks that become longer where they are.
//!
//! What is behind a block is asked for as a request for a place: the slow path serves it like any other, but looks at that one
//! window only. While the driver works, the block may be freed or someone else may take the place, so every turn begins with a
//! look at both.

use super::core::{Core, Place, Served};
use super::request::{Request, Route, grains};
use super::{Pool, Shared};
use crate::arena::GRAIN_BYTES;
use crate::buddy::{Owner, Run};
use crate::error::{Error, Result};
use crate::units::DevicePtr;

/// Whether a request can have the place that it is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// It is free or unmapped; or the request is for no place.
    Open,
    /// Work is under way on part of it, and may leave it free or unmapped.
    InMotion,
    /// Someone has part of it, or the block before it is not what it was.
    Closed,
}

impl Pool {
    /// Makes the live block that begins at `address` longer where it is, so that it has at least `size` bytes: `true` where
    /// it has them now. What was there stays as it is, and work that is queued on it is not disturbed.
    ///
    /// A block can grow as far as free memory and unmapped pages lie behind it; what is missing is mapped, and room is made for
    /// it, as for a new block. A block of up to 64 KiB lies in a slot, and has the slot's size at the most. `false` says that
    /// it cannot grow there, and that nothing has changed: someone has the memory behind it, or the driver would
    /// not take it back; a slot or the addresses end; or it was asked for [on one handle](Pool::allocate_contiguous). A plain allocation cannot be made longer, so where pages
    /// cannot be mapped blocks only grow into what is free.
    ///
    /// New blocks take the lowest place there is. So a block behind which none was allocated since has room for as much as the
    /// pool may hold, unless the driver is short of addresses; one that grows beside others is soon stopped by the next.
    ///
    /// A block is never made smaller: a `size` that it has already is `true`. [`DevicePtr::NULL`] is a block of zero bytes.
    ///
    /// ```
    /// # #[cfg(feature = "sim")] {
    /// use vrampool::{Device, Pool};
    ///
    /// let pool = Pool::builder().device(Device::simulated()).build()?;
    /// let mut cache = pool.allocate_buffer(2 << 20)?;
    /// assert!(cache.try_grow(64 << 20)?);
    /// assert_eq!(cache.size(), 64 << 20);
    /// let next = pool.allocate_buffer(2 << 20)?;
    /// assert!(!cache.try_grow(65 << 20)?, "{next:?} lies behind it");
    /// # }
    /// # Ok::<(), vrampool::Error>(())
    /// ```
    ///
    /// # Errors
    /// - [`Error::is_out_of_memory`]: the place is to be had, and neither idle memory nor more from the driver fills it.
    /// - [`Error::is_invalid_argument`]: no pool could serve this size; or, with [`Error::invalid_free_reason`], the address
    ///   is not the start of a live block of this pool.
    /// - [`Error::is_driver`]: the driver failed for another reason.
    ///
    /// Nothing has changed then either.
    ///
    /// # Complexity
    /// O(log n) of the memory held, and of the pages behind the block. Where they are to be mapped, as [`Pool::allocate`].
    pub fn try_grow(&self, address: DevicePtr, size: u64) -> Result<bool> {
        if address.is_null() { Ok(size == 0) } else { self.shared.try_grow(address, None, size) }
    }
}

impl Shared {
    /// See [`Pool::try_grow`]; with `serial`, only that allocation's block.
    pub(super) fn try_grow(&self, address: DevicePtr, mut serial: Option<u32>, size: u64) -> Result<bool> {
        self.alive()?;
        let wanted = self.counted(grains(size))?;
        loop {
            let mut core = self.core.lock();
            let place = core.find_allocation(address, serial).map_err(|why| Error::invalid_free(address, why))?;
            // Whoever comes by the address later is another.
            serial = Some(place.serial());
            if core.grow_within(&place, size) {
                return Ok(true);
            }
            let Place::Block(index, block) = place else { return Ok(false) };
            if block.one_handle {
                return Ok(false);
            }
            let behind = Run { start: block.run.end(), len: wanted - block.run.len };
            let request = Request::extension(index, block.serial, behind, size);
            if u64::from(wanted) * GRAIN_BYTES > self.memory_bytes {
                let numbers = core.out_of_memory(&request, None, None);
                drop(core);
                return self.counted(Err(Error::out_of_memory(numbers)));
            }
            if core.way_of(&request) == Way::Closed {
                return Ok(false);
            }
            if core.serve(&request).is_some() {
                return Ok(true);
            }
            drop(core);
            if self.counted(self.grow_unless_displaced(&request))?.is_some() {
                return Ok(true);
            }
        }
    }
}

impl Core {
    /// Makes a live block `size` bytes long, if it was rounded up to that much or more. Whether it was.
    fn grow_within(&mut self, place: &Place, size: u64) -> bool {
        let (requested, bytes) = place.sizes();
        if size > bytes {
            return false;
        }
        if size > requested {
            match *place {
                Place::Block(index, _) => {
                    if let Some(block) = self.blocks.get_mut(index) {
                        block.requested = size;
                    }
                }
                Place::Slot { slab, slot, .. } => self.slabs.set_requested(slab, slot, size as u32),
            }
            self.count_live(0, size - requested);
        }
        true
    }

    /// Gives a run to the block before it, which has `size` bytes then. `None`, and the run is free again, where that is not
    /// there any more, or ends elsewhere.
    pub(super) fn lengthen(&mut self, index: u32, serial: u32, run: Run, size: u64) -> Option<Served> {
        let Some(block) = self.blocks.get_mut(index).filter(|block| block.serial == serial && block.run.end() == run.start) else {
            if !cfg!(vrampool_fault = "displaced_run_is_lost") {
                self.buddy.give(run);
            }
            return None;
        };
        let more = size - block.requested;
        block.run.len += run.len;
        block.requested = size;
        let address = self.buddy.arena.address_of(block.run.start);
        self.count_live(u64::from(run.len) * GRAIN_BYTES, more);
        Some(Served { address, serial })
    }

    /// Whether a request can have the place that it is for.
    pub(super) fn way_of(&self, request: &Request) -> Way {
        let (Some(start), Route::Extension(index, serial)) = (request.shape.at, request.route) else { return Way::Open };
        if !self.blocks.get(index).is_some_and(|block| block.serial == serial && block.run.end() == start) {
            return Way::Closed;
        }
        match self.buddy.obstacle(Run { start, len: request.shape.grains }) {
            None => Way::Open,
            Some(grain) if self.works > 0 && self.is_nobodys(grain) => Way::InMotion,
            Some(_) => Way::Closed,
        }
    }

    /// Whether the first grain of something that is neither free nor unmapped is nobody's: work is under way on it.
    fn is_nobodys(&self, grain: u32) -> bool {
        let page = grain / self.buddy.arena.page_grains();
        self.buddy.arena.has_page(page) && self.buddy.directory.get(grain) == Owner::Nothing && !self.is_committed(grain)
    }

    /// The bytes of the block that a request is to make longer.
    pub(super) fn growing_from(&self, request: &Request) -> Option<u64> {
        let Route::Extension(index, _) = request.route else { return None };
        Some(u64::from(self.blocks.get(index)?.run.len) * GRAIN_BYTES)
    }
}

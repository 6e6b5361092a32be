//! **Arena layer**: address ranges, pages and physical handles — mapping and giving back. It knows nothing of requests.
//!
//! ```text
//! grain space   0 ........................................................ (one index space for a pool)
//!               | region 0 (reserved addresses)            |x| region 1 |x| region 2 |
//! pages         | mapped | mapped | unmapped | mapped | …  |x| mapped   |x| mapped   |    x: barrier page
//! handles       |---- handle 0 ---|          | handle 1 |
//! ```
//!
//! A *region* is one contiguous range of device addresses: either reserved by virtual memory management, whose pages
//! are mapped and unmapped one handle at a time, or one plain allocation, mapped as long as it exists. Regions lie in one
//! index space of grains with a barrier page between them, so nothing built on indices ever joins two regions, even
//! where their addresses touch.
//!
//! # One piece of work, three steps
//! Driver calls are made without the lock that guards the arena. `begin_*` (under the lock) takes the pages out of
//! everyone's reach and charges the bytes; [`Work::grow`] or [`Work::release`] (no lock) calls the driver; and
//! [`Arena::settle`] (under the lock) books what was reached, whatever that is.
//!
//! # Invariants, each in [`Arena::check`]
//! - A1 A page is unmapped, or *busy*: of a mapped handle, of work under way, or of a stuck piece; of one at a time.
//! - A2 `held_bytes` is the sum over mapped handles, work under way and stuck pieces. Bytes are charged before the
//!   first driver call that could take them.
//! - A3 Regions neither overlap nor touch in the index space. No address leads to a region that is being given back:
//!   the driver may hand its addresses out again before the work is settled.
//! - A4 Every page of a handle in the table names it, and no other page does.
//!
//! # Concurrency
//! `Arena` is guarded by its owner's lock. [`Work`] belongs to one thread and holds no lock.
//!
//! # Complexity
//! Address to grain and back: O(log regions), and there is one region unless address space is scarce.

mod regions;
mod table;
mod work;

pub(crate) use regions::Region;
pub(crate) use table::Table;
use work::{Elsewhere, Piece, Place, Stage};
pub(crate) use work::{Failure, Work};

use crate::driver::{Driver, HandleProperties, MemoryKind, PhysicalHandle};
use crate::sync::{Arc, is_planted};
use crate::units::{DeviceId, DevicePtr, MIB};
use bitvec::prelude::{BitSlice, BitVec, Lsb0};
use regions::Regions;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The unit of large allocations, in bytes.
pub(crate) const GRAIN_BYTES: u64 = 16 << 10;
/// The smallest page, in bytes. A page is this or the driver's granularity, whichever is larger.
pub(crate) const MIN_PAGE_BYTES: u64 = 2 * MIB;

/// The length of the index space, in grains.
pub(crate) const MAX_GRAINS: u32 = 1 << 31;

/// Neighbouring pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pages {
    pub(crate) first: u32,
    pub(crate) count: u32,
}

impl Pages {
    pub(crate) const fn end(self) -> u32 {
        self.first + self.count
    }
}

/// What is to be mapped in a hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// A new handle.
    New(Pages),
    /// A handle that lies elsewhere, none of whose memory is in use; its first page is to be `first`.
    Moved { handle: u32, first: u32 },
}

/// At a page without a handle.
const NO_HANDLE: u32 = u32::MAX;

/// Where an arena's memory comes from.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) device: DeviceId,
    pub(crate) kind: MemoryKind,
    /// Bytes in a page: a power of two, a multiple of the driver's granularity.
    pub(crate) page_bytes: u64,
    /// Whether pages can be mapped one by one. Without it, memory comes in plain allocations.
    pub(crate) maps_pages: bool,
    /// What mapped pages are made for.
    pub(crate) handle_properties: HandleProperties,
}

/// What stands behind mapped pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Backing {
    /// A physical handle, mapped.
    Mapped(PhysicalHandle),
    /// A plain allocation, by the address that the driver returned.
    Plain(DevicePtr),
}

/// Physical memory that is mapped whole or not at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Handle {
    pub(crate) pages: Pages,
    pub(crate) bytes: u64,
    backing: Backing,
}

/// The address ranges, pages and handles of one pool. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Arena {
    site: Arc<Site>,
    regions: Regions,
    /// A bit a page: set where the page is not an unmapped page of a region.
    busy: BitVec<u64, Lsb0>,
    handles: Table<Handle>,
    /// The handle at each page, or [`NO_HANDLE`].
    owners: Vec<u32>,
    /// What the driver would not take back. Tried again at every release.
    stuck: Vec<Piece>,
    held_bytes: u64,
    /// Bytes in pieces that have begun and are not settled.
    moving_bytes: u64,
    /// Bytes added to plain allocations, where the driver's addresses are not multiples of a grain.
    plain_padding: u64,
    /// Whether the driver has refused a first, generous reservation of addresses.
    addresses_scarce: bool,
}

impl Arena {
    pub(crate) fn new(site: Arc<Site>) -> Self {
        Self {
            site,
            regions: Regions::default(),
            busy: BitVec::new(),
            handles: Table::default(),
            owners: Vec::new(),
            stuck: Vec::new(),
            held_bytes: 0,
            moving_bytes: 0,
            plain_padding: 0,
            addresses_scarce: false,
        }
    }

    pub(crate) fn site(&self) -> &Arc<Site> {
        &self.site
    }

    pub(crate) fn page_bytes(&self) -> u64 {
        self.site.page_bytes
    }

    pub(crate) fn page_grains(&self) -> u32 {
        (self.site.page_bytes / GRAIN_BYTES) as u32
    }

    /// Bytes held from the driver or about to be, as charged.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Bytes that are neither mapped nor gone: being created or released, or stuck.
    pub(crate) fn unsettled_bytes(&self) -> u64 {
        self.moving_bytes + self.stuck.iter().map(|piece| piece.bytes).sum::<u64>()
    }

    /// How many handles there are.
    pub(crate) fn handle_count(&self) -> usize {
        self.handles.len()
    }

    /// Bytes of plain allocations that lie on no page.
    pub(crate) fn padding_bytes(&self) -> u64 {
        if self.plain_padding == 0 {
            return 0;
        }
        self.handles.iter().map(|(_, handle)| handle.bytes - u64::from(handle.pages.count) * self.page_bytes()).sum()
    }

    pub(crate) fn handles(&self) -> impl Iterator<Item = (u32, &Handle)> {
        self.handles.iter()
    }

    pub(crate) fn handle(&self, index: u32) -> Option<&Handle> {
        self.handles.get(index)
    }

    // ---- addresses ----

    /// The address at which a grain begins.
    pub(crate) fn address_of(&self, grain: u32) -> DevicePtr {
        let region = self.regions.of_page(grain / self.page_grains()).expect("a grain in use lies in a region");
        region.base.offset(u64::from(grain - region.pages.first * self.page_grains()) * GRAIN_BYTES)
    }

    /// The grain that an address lies in, and how far; `None` where no region has it.
    pub(crate) fn grain_of(&self, address: DevicePtr) -> Option<(u32, u64)> {
        let region = self.regions.of_address(address)?;
        let offset = address.address() - region.base.address();
        if offset >= u64::from(region.pages.count) * self.page_bytes() {
            return None;
        }
        let grain = region.pages.first * self.page_grains() + (offset / GRAIN_BYTES) as u32;
        Some((grain, offset % GRAIN_BYTES))
    }

    /// The first grain from `grain` on whose address is a multiple of `alignment` bytes (a power of two).
    pub(crate) fn align_up(&self, grain: u32, alignment: u64) -> Option<u32> {
        let region = self.regions.of_page(grain / self.page_grains())?;
        let address = region.base.address() + u64::from(grain - region.pages.first * self.page_grains()) * GRAIN_BYTES;
        let aligned = address.checked_next_multiple_of(alignment)?;
        (aligned - address).is_multiple_of(GRAIN_BYTES).then_some(())?;
        grain.checked_add(u32::try_from((aligned - address) / GRAIN_BYTES).ok()?)
    }

    // ---- pages ----

    /// Whether a page lies in a region.
    pub(crate) fn has_page(&self, page: u32) -> bool {
        self.regions.of_page(page).is_some()
    }

    /// The unmapped pages from `page` on that nothing is being done to.
    pub(crate) fn hole_from(&self, page: u32) -> Pages {
        let count = match self.regions.of_page(page) {
            Some(region) if region.reserved_bytes.is_some() => {
                let rest = &self.busy[page as usize..region.pages.end() as usize];
                rest.first_one().unwrap_or(rest.len()) as u32
            }
            _ => 0,
        };
        Pages { first: page, count }
    }

    /// Calls `found` with every hole, lowest first, until it returns `false`.
    pub(crate) fn visit_holes(&self, mut found: impl FnMut(Pages) -> bool) {
        for region in self.regions.iter().filter(|region| region.reserved_bytes.is_some()) {
            let bits: &BitSlice<u64, Lsb0> = &self.busy[region.pages.first as usize..region.pages.end() as usize];
            let mut at = 0;
            while let Some(zero) = bits[at..].first_zero() {
                let from = at + zero;
                let count = bits[from..].first_one().unwrap_or(bits.len() - from);
                if !found(Pages { first: region.pages.first + from as u32, count: count as u32 }) {
                    return;
                }
                at = from + count;
            }
        }
    }

    // ---- regions ----

    /// Whether the driver has refused a generous reservation before.
    pub(crate) fn addresses_scarce(&self) -> bool {
        self.addresses_scarce
    }

    pub(crate) fn note_addresses_scarce(&mut self) {
        self.addresses_scarce = true;
    }

    /// Adds a reserved range of addresses. `None`, with nothing changed, where the index space is full.
    pub(crate) fn add_region(&mut self, base: DevicePtr, bytes: u64) -> Option<()> {
        let count = u32::try_from(bytes / self.page_bytes()).ok()?;
        let pages = self.regions.vacant(count, self.page_grains())?;
        self.mark(pages, true);
        self.busy[pages.first as usize..pages.end() as usize].fill(false);
        self.regions.insert(Region { base, pages, reserved_bytes: Some(bytes) });
        Some(())
    }

    fn mark(&mut self, pages: Pages, busy: bool) {
        if self.busy.len() < pages.end() as usize {
            self.busy.resize(pages.end() as usize, true);
        }
        self.busy[pages.first as usize..pages.end() as usize].fill(busy);
    }

    // ---- work ----

    /// Begins to map holes: `parts`, which neither overlap nor leave a hole. Their pages are taken, the bytes of new handles
    /// charged; a handle that is to be moved leaves the table.
    pub(crate) fn begin_map(&mut self, parts: &[Part]) -> Work {
        let mut pieces = Vec::with_capacity(parts.len());
        for &part in parts {
            let pages = match part {
                Part::New(pages) => pages,
                Part::Moved { handle, first } => {
                    Pages { first, count: self.handles.get(handle).expect("a handle that is moved is in the table").pages.count }
                }
            };
            debug_assert!(self.hole_from(pages.first).count >= pages.count, "{pages:?} is not a hole");
            let place = self.place_of(pages);
            self.mark(pages, true);
            match part {
                Part::New(_) => {
                    let bytes = u64::from(pages.count) * self.page_bytes();
                    pieces.push(Piece { place, elsewhere: Elsewhere::Nowhere, bytes, stage: Stage::Planned });
                    self.held_bytes += bytes;
                }
                Part::Moved { handle, .. } => pieces.extend(self.take_handle(handle, Elsewhere::Target(place))),
            }
        }
        self.moving_bytes += pieces.iter().map(|piece| piece.bytes).sum::<u64>();
        Work::new(Arc::clone(&self.site), pieces)
    }

    fn place_of(&self, pages: Pages) -> Place {
        Place { pages, address: self.address_of(pages.first * self.page_grains()) }
    }

    /// Takes a handle out of the table, as a piece of work.
    fn take_handle(&mut self, index: u32, elsewhere: Elsewhere) -> Option<Piece> {
        let handle = self.handles.remove(index)?;
        self.owners[handle.pages.first as usize..handle.pages.end() as usize].fill(NO_HANDLE);
        let stage = match handle.backing {
            Backing::Mapped(physical) => Stage::Accessible(physical),
            Backing::Plain(base) => Stage::Allocated(base),
        };
        Some(Piece { place: self.place_of(handle.pages), elsewhere, bytes: handle.bytes, stage })
    }

    fn insert_handle(&mut self, handle: Handle) {
        let index = self.handles.insert(handle);
        let end = handle.pages.end() as usize;
        if self.owners.len() < end {
            self.owners.resize(end, NO_HANDLE);
        }
        self.owners[handle.pages.first as usize..end].fill(index);
    }

    /// The handle that is mapped at a page, and its index.
    pub(crate) fn handle_at(&self, page: u32) -> Option<(u32, &Handle)> {
        let index = *self.owners.get(page as usize)?;
        Some((index, self.handles.get(index)?))
    }

    /// What a plain allocation for `pages` pages takes from the driver, in bytes.
    pub(crate) fn plain_bytes(&self, pages: u32) -> u64 {
        u64::from(pages) * self.page_bytes() + self.plain_padding
    }

    /// Begins a plain allocation. Its bytes are charged; its pages are known when it is settled.
    pub(crate) fn begin_plain(&mut self, pages: u32) -> Work {
        let pages_wanted = Pages { first: 0, count: pages };
        let place = Place { pages: pages_wanted, address: DevicePtr::NULL };
        let piece = Piece { place, elsewhere: Elsewhere::Nowhere, bytes: self.plain_bytes(pages), stage: Stage::PlannedPlain };
        self.held_bytes += piece.bytes;
        self.moving_bytes += piece.bytes;
        Work::new(Arc::clone(&self.site), vec![piece])
    }

    /// Begins to give handles back, and whatever is stuck. The handles leave the table; their pages stay taken.
    pub(crate) fn begin_release(&mut self, handles: &[u32]) -> Work {
        let mut pieces = std::mem::take(&mut self.stuck);
        for &index in handles {
            let Some(piece) = self.take_handle(index, Elsewhere::Nowhere) else { continue };
            if let Stage::Allocated(_) = piece.stage {
                self.regions.hide(piece.place.pages.first);
            }
            pieces.push(piece);
        }
        self.moving_bytes += pieces.iter().map(|piece| piece.bytes).sum::<u64>();
        Work::new(Arc::clone(&self.site), pieces)
    }

    pub(crate) fn has_stuck_pieces(&self) -> bool {
        !self.stuck.is_empty()
    }

    /// Books what work has reached, whole or in part, and returns the pages that are mapped now.
    pub(crate) fn settle(&mut self, mut work: Work) -> Vec<Pages> {
        let mut mapped = Vec::new();
        for mut piece in work.take_pieces() {
            self.moving_bytes -= piece.bytes;
            if let Elsewhere::Target(other) | Elsewhere::Origin(other) = std::mem::replace(&mut piece.elsewhere, Elsewhere::Nowhere) {
                self.mark(other.pages, false);
            }
            match piece.stage {
                Stage::Planned => {
                    self.mark(piece.place.pages, false);
                    self.held_bytes -= piece.bytes;
                }
                Stage::PlannedPlain => self.held_bytes -= piece.bytes,
                // The pages can be mapped again, and are this piece's no more; the memory is not gone yet.
                Stage::Created(_) => {
                    self.mark(piece.place.pages, false);
                    piece.place.pages.count = 0;
                    self.stuck.push(piece);
                }
                Stage::Mapped(_) => self.stuck.push(piece),
                Stage::Accessible(physical) => {
                    mapped.push(piece.place.pages);
                    self.insert_handle(Handle { pages: piece.place.pages, bytes: piece.bytes, backing: Backing::Mapped(physical) });
                }
                Stage::Allocated(base) => match self.place_plain(&mut piece, base) {
                    Some(pages) => {
                        mapped.push(pages);
                        self.insert_handle(Handle { pages, bytes: piece.bytes, backing: Backing::Plain(base) });
                    }
                    None => self.stuck.push(piece),
                },
                Stage::Freed => {
                    self.regions.remove(piece.place.pages.first);
                    self.held_bytes -= piece.bytes;
                }
            }
        }
        mapped
    }

    /// Gives a plain allocation its pages: those it has already, or new ones. `None` where its address, brought up to a
    /// multiple of a grain, leaves too little; the next plain allocation is then asked for with padding.
    fn place_plain(&mut self, piece: &mut Piece, base: DevicePtr) -> Option<Pages> {
        if !piece.place.address.is_null() {
            self.regions.show(piece.place.pages.first);
            return Some(piece.place.pages);
        }
        let lost = base.address().next_multiple_of(GRAIN_BYTES) - base.address();
        if lost + u64::from(piece.place.pages.count) * self.page_bytes() > piece.bytes {
            self.plain_padding = GRAIN_BYTES;
            return None;
        }
        piece.place.pages = self.regions.vacant(piece.place.pages.count, self.page_grains())?;
        piece.place.address = base.offset(lost);
        self.regions.insert(Region { base: piece.place.address, pages: piece.place.pages, reserved_bytes: None });
        self.mark(piece.place.pages, true);
        Some(piece.place.pages)
    }

    /// Gives everything back to the driver: all handles, stuck pieces and addresses. What fails, by an error or a panic
    /// of the driver, is tried once more and then lost, since nobody is left to ask again.
    pub(crate) fn close(&mut self) {
        for _ in 0..if is_planted("closed_once") { 1 } else { 2 } {
            let handles: Vec<u32> = self.handles.iter().map(|(index, _)| index).collect();
            let mut work = self.begin_release(&handles);
            let _ = catch_unwind(AssertUnwindSafe(|| work.release()));
            self.settle(work);
        }
        let driver = &self.site.driver;
        for region in self.regions.iter() {
            if let Some(bytes) = region.reserved_bytes {
                let free = || driver.mem_address_free(region.base, bytes);
                let _ = (0..2).any(|_| matches!(catch_unwind(AssertUnwindSafe(free)), Ok(Ok(()))));
            }
        }
        self.regions = Regions::default();
    }

    /// Checks A1 to A4 at a moment when no work is under way.
    ///
    /// # Errors
    /// The first violation found.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.regions.check()?;
        let mut expected: BitVec<u64, Lsb0> = BitVec::repeat(true, self.busy.len());
        for region in self.regions.iter().filter(|region| region.reserved_bytes.is_some()) {
            expected[region.pages.first as usize..region.pages.end() as usize].fill(false);
        }
        let mut held = self.moving_bytes;
        let stuck = self.stuck.iter().filter(|piece| matches!(piece.stage, Stage::Mapped(_))).map(|piece| piece.place.pages);
        let plain = |handle: &Handle| matches!(handle.backing, Backing::Plain(_));
        for pages in self.handles.iter().filter(|(_, handle)| !plain(handle)).map(|(_, handle)| handle.pages).chain(stuck) {
            let bits = &mut expected[pages.first as usize..pages.end() as usize];
            if bits.any() {
                return Err(format!("A1: {pages:?} is mapped twice, or outside a reservation"));
            }
            bits.fill(true);
        }
        for (index, handle) in self.handles.iter() {
            if (handle.pages.first..handle.pages.end()).any(|page| self.owners[page as usize] != index) {
                return Err(format!("A4: handle {index} is not found at each of its pages"));
            }
        }
        if self.owners.iter().filter(|&&owner| owner != NO_HANDLE).count() as u64
            != self.handles.iter().map(|(_, handle)| u64::from(handle.pages.count)).sum::<u64>()
        {
            return Err("A4: a page names a handle that is not there".into());
        }
        held += self.handles.iter().map(|(_, handle)| handle.bytes).sum::<u64>();
        held += self.stuck.iter().map(|piece| piece.bytes).sum::<u64>();
        if held != self.held_bytes {
            return Err(format!("A2: {held} bytes are held, {} are charged", self.held_bytes));
        }
        if self.moving_bytes == 0 && expected != self.busy {
            return Err("A1: a page is marked otherwise than its handle says".into());
        }
        Ok(())
    }
}

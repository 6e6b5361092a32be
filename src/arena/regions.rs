//! The regions of an arena, by address and by page.

use super::{MAX_GRAINS, Pages};
use crate::units::DevicePtr;
use std::collections::BTreeMap;

/// A contiguous range of device addresses and its place in the index space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Region {
    pub(crate) base: DevicePtr,
    pub(crate) pages: Pages,
    /// The size of the reservation; `None` for a plain allocation.
    pub(crate) reserved_bytes: Option<u64>,
}

/// All regions of an arena.
#[derive(Debug, Default)]
pub(super) struct Regions {
    /// By first page.
    by_page: BTreeMap<u32, Region>,
    /// First pages, by base address.
    by_address: BTreeMap<DevicePtr, u32>,
}

impl Regions {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Region> {
        self.by_page.values()
    }

    pub(super) fn of_page(&self, page: u32) -> Option<&Region> {
        let (_, region) = self.by_page.range(..=page).next_back()?;
        (page < region.pages.end()).then_some(region)
    }

    /// The region with the highest base at or below an address; the address may lie behind its end.
    pub(super) fn of_address(&self, address: DevicePtr) -> Option<&Region> {
        let (_, page) = self.by_address.range(..=address).next_back()?;
        self.by_page.get(page)
    }

    /// The lowest vacant place for a region of `count` pages, a barrier page away from its neighbours.
    pub(super) fn vacant(&self, count: u32, page_grains: u32) -> Option<Pages> {
        let mut first = 0u32;
        for region in self.by_page.values() {
            if region.pages.first > first && region.pages.first - first > count {
                break;
            }
            first = region.pages.end() + 1;
        }
        let end = first.checked_add(count)?;
        (end <= MAX_GRAINS / page_grains).then_some(Pages { first, count })
    }

    pub(super) fn insert(&mut self, region: Region) {
        self.by_page.insert(region.pages.first, region);
        self.by_address.insert(region.base, region.pages.first);
    }

    /// Leaves a region's place to it, but lets no address lead there: the driver may give its addresses to another
    /// region before [`Self::remove`].
    pub(super) fn hide(&mut self, page: u32) {
        if let Some(region) = self.by_page.get(&page) {
            self.by_address.remove(&region.base);
        }
    }

    /// Undoes [`Self::hide`].
    pub(super) fn show(&mut self, page: u32) {
        if let Some(region) = self.by_page.get(&page) {
            self.by_address.insert(region.base, page);
        }
    }

    /// Takes away a hidden region.
    pub(super) fn remove(&mut self, page: u32) {
        self.by_page.remove(&page);
    }

    /// Checks that regions keep a barrier page between them and that both indices agree.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut free = 0;
        for region in self.by_page.values() {
            if region.pages.first < free {
                return Err(format!("A3: {region:?} touches the region before it"));
            }
            free = region.pages.end() + 1;
            if self.by_address.get(&region.base) != Some(&region.pages.first) {
                return Err(format!("A3: {region:?} is not found by its address"));
            }
        }
        if self.by_address.len() == self.by_page.len() { Ok(()) } else { Err("A3: an address leads to no region".into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(base: u64, pages: Pages) -> Region {
        Region { base: DevicePtr::new(base), pages, reserved_bytes: None }
    }

    #[test]
    fn places_are_used_again_and_never_touch() {
        let mut regions = Regions::default();
        for (base, count) in [(0x1000_0000, 4), (0x2000_0000, 2), (0x3000_0000, 8)] {
            let pages = regions.vacant(count, 128).unwrap();
            regions.insert(region(base, pages));
            regions.check().unwrap();
        }
        assert_eq!(regions.iter().map(|r| r.pages.first).collect::<Vec<_>>(), [0, 5, 8]);
        regions.hide(5);
        assert!(regions.check().is_err());
        assert_eq!(regions.of_address(DevicePtr::new(0x2000_0000)).map(|r| r.pages.first), Some(0));
        regions.show(5);
        regions.check().unwrap();
        // A hidden region's addresses come back in another; it goes without taking that along.
        regions.hide(5);
        let pages = regions.vacant(3, 128).unwrap();
        regions.insert(region(0x2000_0000, pages));
        regions.remove(5);
        regions.check().unwrap();
        assert_eq!(regions.of_address(DevicePtr::new(0x2000_0000)).map(|r| r.pages), Some(pages));
        regions.hide(pages.first);
        regions.remove(pages.first);
        assert_eq!(regions.vacant(2, 128), Some(Pages { first: 5, count: 2 }));
        assert_eq!(regions.vacant(3, 128), Some(Pages { first: 17, count: 3 }));
        regions.hide(0);
        regions.remove(0);
        assert_eq!(regions.vacant(7, 128), Some(Pages { first: 0, count: 7 }));
        assert_eq!(regions.vacant(8, 128), Some(Pages { first: 17, count: 8 }));
        assert_eq!(regions.vacant(MAX_GRAINS / 128, 128), None);
        assert_eq!(regions.of_page(7), None);
        assert_eq!(regions.of_page(15).map(|r| r.base.address()), Some(0x3000_0000));
        assert_eq!(regions.of_address(DevicePtr::new(0x2fff_ffff)), None);
    }
}

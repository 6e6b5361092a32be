//! How the missing pages of a window come by memory: by handles that lie idle elsewhere, and by new ones.

use crate::arena::{Pages, Part};

/// A handle of which every grain is free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Idle {
    /// Its index.
    pub(crate) handle: u32,
    pub(crate) pages: Pages,
    pub(crate) bytes: u64,
}

/// What is mapped where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Filling {
    pub(crate) parts: Vec<Part>,
    /// How many pages new handles are made for.
    pub(crate) new_pages: u32,
    /// The first idle handles that were passed over, since they fit no hole.
    pub(crate) too_large: Vec<Idle>,
}

/// Fills holes: with idle handles, in their order, until at most `new_pages` pages are left, and the rest with new handles of
/// a power of two pages, at most `handle_pages`.
///
/// A handle is mapped whole, so one that is larger than every hole left is no help. Where too few fit, more pages are left
/// than were to be.
pub(crate) fn fill(missing: &[Pages], idle: &[Idle], new_pages: u32, handle_pages: u32) -> Filling {
    let mut holes = missing.to_vec();
    let mut filling =
        Filling { parts: Vec::new(), new_pages: missing.iter().map(|hole| hole.count).sum(), too_large: Vec::new() };
    for idle in idle {
        if filling.new_pages <= new_pages {
            break;
        }
        let Some(hole) = holes.iter_mut().find(|hole| hole.count >= idle.pages.count) else {
            filling.too_large.push(*idle);
            continue;
        };
        filling.parts.push(Part::Moved { handle: idle.handle, first: hole.first });
        hole.first += idle.pages.count;
        hole.count -= idle.pages.count;
        filling.new_pages -= idle.pages.count;
    }
    for mut hole in holes {
        while hole.count > 0 {
            let count = handle_pages.min(1 << hole.count.ilog2());
            filling.parts.push(Part::New(Pages { first: hole.first, count }));
            hole.first += count;
            hole.count -= count;
        }
    }
    filling
}

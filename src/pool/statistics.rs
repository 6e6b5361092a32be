//! What a pool has done and holds.

use crate::slab::Class;

/// A snapshot of a pool's counts, taken at one moment. All sizes are in bytes.
///
/// Every byte held from the driver is in exactly one place:
/// `live + slab_idle + free + committed + unsettled + padding == reserved`, which [`Statistics::accounted_bytes`] adds up.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Statistics {
    /// Bytes of live blocks, as asked for.
    pub requested_bytes: u64,
    /// Bytes of live blocks, as rounded to slots and grains.
    pub live_bytes: u64,
    /// Live blocks. Blocks of zero bytes are not counted.
    pub live_blocks: u64,
    /// Bytes in slabs that are in no live slot.
    pub slab_idle_bytes: u64,
    /// Bytes mapped and free.
    pub free_bytes: u64,
    /// The longest stretch of them.
    pub largest_free_bytes: u64,
    /// Bytes that are left of [reservations](crate::Reservation).
    pub committed_bytes: u64,
    /// Bytes being mapped or given back at this moment, or that the driver would not take back.
    pub unsettled_bytes: u64,
    /// Bytes lost to the alignment of plain allocations.
    pub padding_bytes: u64,
    /// Bytes held from the driver.
    pub reserved_bytes: u64,
    /// The most that may be held; `None` where only the device limits it.
    pub capacity_bytes: Option<u64>,
    /// The most that `requested_bytes` ever was.
    pub peak_requested_bytes: u64,
    /// The most that `live_bytes` ever was.
    pub peak_live_bytes: u64,
    /// The most that `reserved_bytes` ever was.
    pub peak_reserved_bytes: u64,
    /// Allocations that succeeded.
    pub allocations: u64,
    /// Blocks freed.
    pub deallocations: u64,
    /// Allocations, reservations and growths in place that failed for lack of memory or by the driver's fault, or that no pool could serve.
    pub failed_allocations: u64,
    /// Frees of addresses that were not the start of a live block.
    pub refused_frees: u64,
    /// Live blocks that are not in slabs.
    pub large_blocks: u64,
    /// The size classes, smallest first.
    pub classes: Vec<ClassStatistics>,
}

/// What one size class holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ClassStatistics {
    /// Bytes in a slot.
    pub slot_bytes: u64,
    /// Slabs with at least one live slot.
    pub slabs: u64,
    /// Bytes in those slabs.
    pub slab_bytes: u64,
    /// Live slots in them.
    pub live_slots: u64,
    /// Bytes asked for in the live slots.
    pub requested_bytes: u64,
}

impl Statistics {
    /// Those of a pool that holds nothing.
    pub(super) fn of_nothing() -> Self {
        let class = |class: Class| ClassStatistics { slot_bytes: class.slot_bytes(), ..ClassStatistics::default() };
        Self { classes: Class::all().map(class).collect(), ..Self::default() }
    }

    /// The sum of every place that a byte held from the driver can be in.
    #[must_use]
    pub fn accounted_bytes(&self) -> u64 {
        self.live_bytes + self.slab_idle_bytes + self.free_bytes + self.committed_bytes + self.unsettled_bytes + self.padding_bytes
    }
}

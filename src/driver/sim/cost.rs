//! What each call would have cost on a real device.
//!
//! The figures are medians of the driver's own calls on one machine: an H200, 16 cores, driver 580, CUDA 13, calls made
//! by one thread. Between two measured sizes the time is interpolated linearly; below the first it is the first, above
//! the last it grows on at the slope of the last two.

use crate::units::{GIB, KIB, MIB};

/// (bytes, nanoseconds), in ascending order.
type Table = &'static [(u64, u64)];

pub(super) const MEM_CREATE: Table = &[(2 * MIB, 13_000), (64 * MIB, 35_000), (GIB, 104_000)];
pub(super) const MEM_RELEASE: Table = &[(2 * MIB, 14_000), (64 * MIB, 49_000), (256 * MIB, 147_000), (GIB, 611_000)];
pub(super) const MEM_MAP: Table = &[(2 * MIB, 1_000), (GIB, 3_000)];
/// Per mapping in the range.
pub(super) const MEM_UNMAP: Table = &[(2 * MIB, 19_000), (256 * MIB, 25_000), (GIB, 38_000)];
/// Of a range that is one mapping.
pub(super) const MEM_SET_ACCESS: Table = &[(2 * MIB, 29_000), (256 * MIB, 35_000), (GIB, 89_000)];
/// Of each mapping in a range of several, at the least.
pub(super) const MEM_SET_ACCESS_OF_SEVERAL: u64 = 40_000;
pub(super) const MEM_ADDRESS_RESERVE: Table = &[(2 * MIB, 2_000), (64 << 40, 30_000)];
pub(super) const MEM_ADDRESS_FREE: Table = MEM_ADDRESS_RESERVE;
/// `cuMemAlloc`, 64 in a row, after others.
pub(super) const MEM_ALLOC: Table = &[
    (64 * KIB, 2_000),
    (256 * KIB, 5_000),
    (MIB, 17_900),
    (4 * MIB, 35_500),
    (16 * MIB, 39_900),
    (256 * MIB, 56_700),
    (GIB, 154_000),
    (16 * GIB, 888_000),
];
/// `cuMemFree`, likewise.
pub(super) const MEM_FREE: Table = &[
    (64 * KIB, 1_900),
    (256 * KIB, 4_600),
    (MIB, 15_700),
    (4 * MIB, 30_900),
    (16 * MIB, 39_400),
    (256 * MIB, 116_000),
    (GIB, 623_000),
    (16 * GIB, 12_457_000),
];
pub(super) const MEM_ALLOC_HOST: Table = &[(2 * MIB, 1_000_000), (GIB, 535_000_000)];
pub(super) const MEM_FREE_HOST: Table = &[(2 * MIB, 400_000), (GIB, 166_000_000)];

/// `cuMemAllocAsync` from a pool that keeps what is freed: 711 to 796 ns, whatever the size.
pub(super) const MEM_ALLOC_ASYNC: u64 = 750;
/// `cuMemFreeAsync`, likewise: 457 to 510 ns.
pub(super) const MEM_FREE_ASYNC: u64 = 480;

pub(super) const MEMORY_INFO: u64 = 7_000;
pub(super) const EVENT_CREATE: u64 = 240;
pub(super) const EVENT_RECORD: u64 = 260;
pub(super) const EVENT_QUERY: u64 = 290;
pub(super) const STREAM_WAIT_EVENT: u64 = 180;
pub(super) const STREAM_ID: u64 = 30;
pub(super) const STREAM_CAPTURE_STATUS: u64 = 20;
/// Calls of streams and events that were not measured one by one.
pub(super) const OTHER_SYNC: u64 = 300;

/// The time of a call on `bytes` bytes, in nanoseconds.
pub(super) fn of(table: Table, bytes: u64) -> u64 {
    let first = table[0];
    if bytes <= first.0 {
        return first.1;
    }
    let upper = table.iter().position(|&(size, _)| bytes <= size).unwrap_or(table.len() - 1);
    let (from, to) = (table[upper - 1], table[upper]);
    let rise = u128::from(to.1 - from.1) * u128::from(bytes - from.0) / u128::from(to.0 - from.0);
    from.1 + u64::try_from(rise).unwrap_or(u64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_sizes_cost_what_was_measured_and_others_lie_between() {
        let tables = [
            MEM_CREATE,
            MEM_RELEASE,
            MEM_MAP,
            MEM_UNMAP,
            MEM_SET_ACCESS,
            MEM_ADDRESS_RESERVE,
            MEM_ALLOC,
            MEM_FREE,
            MEM_ALLOC_HOST,
            MEM_FREE_HOST,
        ];
        for table in tables {
            assert_eq!(of(table, 0), table[0].1);
            for &(bytes, ns) in table {
                assert_eq!(of(table, bytes), ns);
            }
            for pair in table.windows(2) {
                assert!(pair[0] < pair[1], "ascending");
                let middle = of(table, pair[0].0.midpoint(pair[1].0));
                assert!(pair[0].1 <= middle && middle <= pair[1].1);
            }
        }
        assert_eq!(of(MEM_RELEASE, 2 * GIB), 611_000 + (611_000 - 147_000) * 4 / 3);
        assert!(of(MEM_ALLOC, u64::MAX) > of(MEM_ALLOC, 1 << 40));
    }
}

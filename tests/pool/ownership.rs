//! Who frees a block, and what becomes of blocks on a device that broke.

use crate::support::{DEVICE, Draw, Machine, SOURCES, free};
use std::mem;
use std::sync::Arc;
use vrampool::driver::{Driver, MemoryKind};
use vrampool::error::{CuResult, InvalidFree};
use vrampool::units::{DeviceId, KIB, MIB};
use vrampool::{Device, DeviceBuffer, DevicePtr, Pool, Result};

const SIZES: [u64; 7] = [1, 256, 5000, 64 * KIB, 64 * KIB + 1, 3 * MIB, 40 * MIB];

/// Makes a buffer of an address.
#[allow(unsafe_code)]
fn from_raw(pool: &Pool, address: DevicePtr) -> Result<DeviceBuffer> {
    // SAFETY: no work is queued here; where a block has two owners, that is what is tested, and no memory is touched.
    unsafe { DeviceBuffer::from_raw(pool, address) }
}

/// A conversion that forgets who owns the block frees it twice, or never.
#[test]
fn a_block_that_changes_hands_is_freed_exactly_once() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        for (turn, size) in SIZES.into_iter().enumerate() {
            let mut buffer = pool.allocate_buffer(size).unwrap();
            let address = buffer.address();
            for _ in 0..3 {
                let raw = buffer.into_raw();
                assert_eq!((raw, machine.check(&pool).live_blocks), (address, 1), "{source:?}: {size}");
                buffer = from_raw(&pool, raw).unwrap();
                assert_eq!((buffer.address(), buffer.size()), (address, size), "{source:?}");
            }
            // The last owner frees it, in each of the ways that there are.
            match turn % 3 {
                0 => drop(buffer),
                1 => buffer.free().unwrap(),
                _ => free(&pool, buffer.into_raw()).unwrap(),
            }
            let after = machine.check(&pool);
            assert_eq!((after.live_blocks, after.deallocations), (0, turn as u64 + 1), "{source:?}: {size}");
            assert_eq!(after.refused_frees, turn as u64, "the refusals below");
            assert_eq!(free(&pool, address).unwrap_err().invalid_free_reason(), Some(InvalidFree::NotLive), "{source:?}");
        }
        machine.finish(pool);
    }
}

/// What was allocated without an owner may get one.
#[test]
fn a_buffer_is_made_of_a_block_that_nobody_owns() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        for size in SIZES {
            let buffer = from_raw(&pool, pool.allocate(size).unwrap()).unwrap();
            assert_eq!(buffer.size(), size);
            // It keeps the memory alive, as any other does.
            let other = machine.pool();
            let kept = from_raw(&other, other.allocate(size).unwrap()).unwrap();
            drop(other);
            assert!(machine.is_usable(kept.address(), size), "{source:?}: {size}");
        }
        let nothing = from_raw(&pool, DevicePtr::NULL).unwrap();
        assert_eq!((nothing.address(), nothing.size(), nothing.free().is_ok()), (DevicePtr::NULL, 0, true));
        assert_eq!(machine.check(&pool).live_blocks, 0);
        machine.finish(pool);
    }
}

/// A buffer of what is no block would free a part of somebody's, or another pool's.
#[test]
fn no_buffer_is_made_of_what_is_not_the_start_of_a_live_block() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let (pool, other) = (machine.pool(), machine.pool());
        let blocks = SIZES.map(|size| pool.allocate_buffer(size).unwrap());
        let gone = pool.allocate_buffer(3 * MIB).unwrap().address();
        let foreign = other.allocate_buffer(MIB).unwrap();
        let before = pool.statistics();
        let mut wrong =
            vec![(gone, InvalidFree::NotLive), (foreign.address(), InvalidFree::Foreign), (DevicePtr::new(1), InvalidFree::Foreign)];
        for block in blocks.iter().filter(|block| block.size() > 256) {
            wrong.extend([1, 256, block.size() - 1].map(|offset| (block.address().offset(offset), InvalidFree::Interior)));
        }
        for (address, reason) in wrong {
            let error = from_raw(&pool, address).unwrap_err();
            assert_eq!((error.is_invalid_argument(), error.invalid_free_reason()), (true, Some(reason)), "{source:?}: {address}");
        }
        pool.check().unwrap();
        assert_eq!(pool.statistics(), before, "nothing changed, and nothing was freed that could be refused");
        drop((blocks, foreign, other));
        machine.finish(pool);
    }
}

/// Two buffers of one block break the promise; even then the block is freed once, and its next owner is left alone.
#[test]
fn of_two_owners_one_frees() {
    for source in SOURCES {
        for size in SIZES {
            let machine = Machine::large(source);
            let pool = machine.pool();
            let first = pool.allocate_buffer(size).unwrap();
            let second = from_raw(&pool, first.address()).unwrap();
            drop(first);
            let next = pool.allocate_buffer(size).unwrap();
            assert_eq!(next.address(), second.address(), "{source:?}: the test wants the address again");
            assert_eq!(second.free().unwrap_err().error().invalid_free_reason(), Some(InvalidFree::Stale));
            assert_eq!(machine.check(&pool).live_blocks, 1);
            next.free().unwrap();
            machine.finish(pool);
        }
    }
}

/// A block that is given up for good is the pool's at its end; a buffer that is forgotten keeps the pool for good.
#[test]
fn what_is_leaked_is_leaked_once() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        _ = pool.allocate_buffer(3 * MIB).unwrap().into_raw();
        machine.finish(pool);
        let pool = machine.pool();
        let buffer = pool.allocate_buffer(3 * MIB).unwrap();
        let address = buffer.address();
        mem::forget(buffer);
        drop(pool);
        assert!(machine.is_usable(address, 3 * MIB), "{source:?}");
        assert!(machine.sim.audit().is_err());
    }
}

/// Memory goes back by the function that belongs to the one that it came by, in whatever order the kinds are used. The
/// simulated device refuses every other.
#[test]
fn every_kind_of_memory_goes_back_as_what_it_is() {
    let kinds = [MemoryKind::Device, MemoryKind::Pinned, MemoryKind::Managed];
    for source in SOURCES {
        let machine = Machine::large(source);
        let pools = kinds.map(|kind| machine.builder().kind(kind).maximum(256 * MIB).build().unwrap());
        let mut draw = Draw(7);
        let mut live: Vec<DeviceBuffer> = Vec::new();
        for turn in 0..600 {
            let pool = &pools[draw.below(3) as usize];
            match draw.below(5) {
                0 | 1 => live.push(pool.allocate_buffer(draw.size(24)).unwrap()),
                2 if !live.is_empty() => drop(live.swap_remove(draw.below(live.len() as u64) as usize)),
                3 if !live.is_empty() => {
                    let buffer = live.swap_remove(draw.below(live.len() as u64) as usize);
                    let pool = buffer.pool().clone();
                    live.push(from_raw(&pool, buffer.into_raw()).unwrap());
                }
                4 if turn % 7 == 0 => _ = pool.trim(0).unwrap(),
                _ => {}
            }
        }
        for (pool, kind) in pools.iter().zip(kinds) {
            assert_eq!(pool.kind(), kind);
            pool.check().unwrap();
        }
        drop((live, pools));
        machine.sim.audit().unwrap_or_else(|error| panic!("{source:?}: {error}"));
    }
}

/// A free that reports what went wrong on a stream before is a free that nobody can make; a lack of memory that is none sends
/// the program after the wrong fault.
#[test]
fn a_broken_device_is_told_by_its_own_code_and_by_nothing_else() {
    for source in SOURCES {
        for code in [CuResult::ERROR_ILLEGAL_ADDRESS, CuResult::ERROR_LAUNCH_FAILED, CuResult(12_345)] {
            let machine = Machine::large(source);
            let pool = machine.pool();
            let page = source.page_bytes();
            let buffers: Vec<DeviceBuffer> = (0..10).map(|_| pool.allocate_buffer(page).unwrap()).collect();
            let before = machine.check(&pool);
            let calls = machine.memory_calls();
            machine.sim.poison(DEVICE, code);
            drop(buffers);
            // Free memory serves without a look at the device.
            pool.allocate_buffer(page).unwrap().free().unwrap();
            let after = machine.check(&pool);
            assert_eq!((after.live_blocks, after.reserved_bytes, after.refused_frees), (0, before.reserved_bytes, 0), "{source:?}");
            assert_eq!(machine.memory_calls(), calls, "{source:?}: frees call nobody");
            let larger = pool.allocate_buffer(20 * page);
            let trimmed = if source.maps_pages() {
                // Virtual memory management belongs to no context, and goes on.
                drop(larger.unwrap());
                pool.trim(0).map(|held| assert_eq!(held, 0))
            } else {
                let error = larger.unwrap_err();
                assert_eq!((error.is_driver(), error.is_out_of_memory(), error.code()), (true, false, Some(code)), "{source:?}");
                assert_eq!(machine.memory_calls(), calls + 1, "{source:?}: asked once, and nothing is flushed for it");
                assert_eq!(machine.check(&pool).reserved_bytes, before.reserved_bytes);
                pool.trim(0).map(drop)
            };
            assert_eq!(trimmed.map_err(|error| error.code()), if source.maps_pages() { Ok(()) } else { Err(Some(code)) });
            pool.check().unwrap();
            drop(pool);
            assert_eq!(machine.sim.audit().is_ok(), source.maps_pages(), "what a broken context holds, it keeps");
        }
    }
}

/// Whoever asks before there is anything to tell gets zeros; a device that is not there is an error and no index.
#[test]
fn a_pool_that_was_never_used_counts_nothing() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.builder().maximum(256 * MIB).build().unwrap();
        let statistics = machine.check(&pool);
        assert_eq!((statistics.capacity_bytes, statistics.classes.len()), (Some(256 * MIB), 28), "{source:?}");
        assert!(statistics.classes.iter().all(|class| class.slabs + class.slab_bytes + class.live_slots + class.requested_bytes == 0));
        let counts = [
            statistics.requested_bytes,
            statistics.live_bytes,
            statistics.live_blocks,
            statistics.slab_idle_bytes,
            statistics.free_bytes,
            statistics.largest_free_bytes,
            statistics.unsettled_bytes,
            statistics.padding_bytes,
            statistics.peak_requested_bytes,
            statistics.peak_live_bytes,
            statistics.peak_reserved_bytes,
            statistics.allocations,
            statistics.deallocations,
            statistics.failed_allocations,
            statistics.refused_frees,
            statistics.large_blocks,
        ];
        assert_eq!(counts, [0; 16], "{source:?}");
        assert_eq!((pool.trim(0).unwrap(), machine.memory_calls()), (0, 0));
        for ordinal in [1, 99, i32::MAX as u32, u32::MAX] {
            let error = Device::new(Arc::clone(&machine.sim) as Arc<dyn Driver>, DeviceId(ordinal)).unwrap_err();
            assert!(error.is_unavailable() && error.to_string().contains(&ordinal.to_string()), "{error}");
        }
        machine.finish(pool);
    }
}

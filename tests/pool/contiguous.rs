//! Blocks on one handle, or in one plain allocation.

use crate::support::{MAPPED, Machine, SOURCES, Source};
use vrampool::driver::Call;
use vrampool::error::CuResult;
use vrampool::units::{GIB, KIB, MIB};
use vrampool::{DevicePtr, Pool};

/// Whether a block lies in one piece of the driver's memory.
fn is_on_one(machine: &Machine, address: DevicePtr, size: u64) -> bool {
    machine.sim.piece_at(address).is_some_and(|piece| address.address() + size <= piece.address.address() + piece.bytes)
}

/// A block that takes several handles where nothing is said is on one where that is asked for.
#[test]
fn a_block_lies_on_one_handle() {
    for source in SOURCES {
        let machine = Machine::new(source, 2 * GIB);
        let pool = machine.builder().build().unwrap();
        let mut blocks = Vec::new();
        for size in [1, 300, 64 * KIB, 100 * KIB, 2 * MIB, 3 * MIB, 40 * MIB, 63 * MIB, 200 * MIB] {
            for alignment in [1, 512, 2 * MIB, 4 * MIB] {
                // Between them, to break the free runs up.
                blocks.push(pool.allocate_buffer(size / 3 + 1).unwrap());
                let buffer = pool.allocate_buffer_contiguous(size, alignment).unwrap();
                assert!(buffer.address().is_aligned_to(alignment.max(256)));
                assert!(is_on_one(&machine, buffer.address(), size), "{source:?}: {size} at {alignment}");
                pool.check().unwrap();
                blocks.push(buffer);
            }
        }
        // What was freed serves the next, in whatever order it came.
        while blocks.len() > 4 {
            blocks.remove(blocks.len() / 2);
            blocks.remove(0);
            let address = pool.allocate_contiguous(5 * MIB, 1).unwrap();
            assert!(is_on_one(&machine, address, 5 * MIB), "{source:?}");
            free(&pool, address);
        }
        drop(blocks);
        assert_eq!(pool.trim(0).unwrap(), 0);
        drop(pool);
        assert_eq!(machine.sim.audit(), Ok(()));
    }
}

#[allow(unsafe_code)]
fn free(pool: &Pool, address: DevicePtr) {
    // SAFETY: no work is queued on a simulated device of addresses, and the block is dropped here.
    unsafe { pool.deallocate(address).unwrap() }
}

/// Free memory on one handle serves the request, without a driver call; a longer stretch over several handles does not.
#[test]
fn free_memory_on_one_handle_is_used_and_over_several_is_not() {
    for source in MAPPED {
        let machine = Machine::new(source, 16 * GIB);
        let page = source.page_bytes();
        let pool = machine.builder().build().unwrap();
        // Handles of one page each, next to each other.
        let singles: Vec<_> = (0..8).map(|_| pool.allocate_buffer(page).unwrap()).collect();
        drop(singles);
        let before = pool.statistics();
        assert_eq!((before.free_bytes, before.largest_free_bytes), (8 * page, 8 * page));
        let made = machine.sim.calls(Call::MemCreate);
        let small = pool.allocate_buffer_contiguous(page, 1).unwrap();
        assert_eq!(machine.sim.calls(Call::MemCreate), made, "one page is there");
        // Five pages over single handles would do for any other block.
        let odd = pool.allocate_buffer_contiguous(5 * page, 1).unwrap();
        assert_eq!(machine.sim.calls(Call::MemCreate), made + 1, "one handle for all of it");
        assert_eq!(machine.sim.piece_at(odd.address()).unwrap().bytes, 5 * page, "of exactly its pages");
        let over_several = pool.allocate_buffer(7 * page).unwrap();
        assert_eq!(machine.sim.calls(Call::MemCreate), made + 1);
        assert!(!is_on_one(&machine, over_several.address(), 7 * page));
        // The handle of five pages serves the next.
        drop(odd);
        let again = pool.allocate_buffer_contiguous(4 * page + 1, 1).unwrap();
        assert_eq!(machine.sim.calls(Call::MemCreate), made + 1);
        drop((small, over_several, again));
        pool.check().unwrap();
    }
}

/// At the limit idle handles go for it; where blocks on them keep them, the error says what was asked.
#[test]
fn room_is_made_at_the_limit_and_what_cannot_be_is_said() {
    for source in MAPPED {
        let page = source.page_bytes();
        let machine = Machine::new(source, 64 * page);
        let pool = machine.builder().maximum(8 * page).build().unwrap();
        let mut singles: Vec<_> = (0..8).map(|_| pool.allocate_buffer(page).unwrap()).collect();
        drop(singles.drain(2..));
        let block = pool.allocate_buffer_contiguous(6 * page, 1).unwrap();
        assert!(is_on_one(&machine, block.address(), 6 * page));
        drop(block);
        let kept = pool.allocate_buffer(1000).unwrap();
        let error = pool.allocate_contiguous(6 * page, 1).unwrap_err();
        assert!(error.is_out_of_memory() && error.to_string().contains("on one handle"), "{error}");
        assert!(error.numbers().unwrap().contiguous && error.numbers().unwrap().largest_free < 6 * page);
        // Free memory side by side on handles that cannot go: enough of it, but not on one.
        drop((kept, singles));
        pool.trim(0).unwrap();
        let halves: Vec<_> = (0..16).map(|_| pool.allocate_buffer(page / 2).unwrap()).collect();
        let mut halves = halves.into_iter().enumerate().filter(|(index, _)| index % 4 == 0 || index % 4 == 3).map(|(_, half)| half);
        let kept: Vec<_> = halves.by_ref().collect();
        assert_eq!(pool.statistics().largest_free_bytes, page);
        let error = pool.allocate_contiguous(page, 1).unwrap_err();
        assert!(error.numbers().unwrap().contiguous && error.numbers().unwrap().largest_free == page, "{error}");
        let plain = pool.allocate_buffer(page).unwrap();
        assert!(!is_on_one(&machine, plain.address(), page));
        drop((kept, plain));
        assert_eq!(pool.statistics().failed_allocations, 2);
        pool.check().unwrap();
    }
}

/// The arguments are checked as for any block, and no driver call that fails leaves anything.
#[test]
fn edges_and_faults() {
    for source in [MAPPED[1], SOURCES[3]] {
        let machine = Machine::new(source, GIB);
        let pool = machine.builder().build().unwrap();
        assert_eq!(pool.allocate_contiguous(0, 1).unwrap(), DevicePtr::NULL);
        for (size, alignment) in [(0, 3), (1, 0), (MIB, 3), (MIB, 2 * GIB), (u64::MAX, 1)] {
            assert!(pool.allocate_contiguous(size, alignment).unwrap_err().is_invalid_argument(), "{size} {alignment}");
        }
        assert!(pool.allocate_contiguous(2 * GIB, 1).unwrap_err().is_out_of_memory());
        for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess, Call::MemAlloc] {
            machine.sim.fail(call, 0, CuResult::ERROR_UNKNOWN);
            let struck = pool.allocate_contiguous(48 * MIB, 1);
            let applies = matches!(source, Source::Mapped(_)) != (call == Call::MemAlloc);
            assert_eq!(struck.is_err(), applies, "{source:?}, {call:?}");
            machine.sim.clear_faults();
            if let Ok(address) = struck {
                free(&pool, address);
            }
            pool.trim(0).unwrap();
            assert_eq!(pool.statistics().reserved_bytes, 0);
            pool.check().unwrap();
        }
        drop(pool);
        assert_eq!(machine.sim.audit(), Ok(()));
    }
}

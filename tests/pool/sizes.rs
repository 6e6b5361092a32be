//! Sizes: what is refused, what is rounded, and that initial, maximum and growth mean what they say.

use crate::support::{Machine, SOURCES, Source, assert_only_failures, free, permutations};
use std::thread;
use vrampool::DevicePtr;
use vrampool::driver::sim::FaultTarget;
use vrampool::error::InvalidFree;
use vrampool::units::{GIB, KIB, MIB};

/// Where rounding wraps round, a negative number that became unsigned gets a block of no bytes, and the next block its
/// address.
#[test]
fn sizes_that_no_pool_can_serve_are_refused_and_nothing_else_happens() {
    let top = (0..=520).chain([1023, 4095, 4096, 16383, 16384, 65536, 2 << 20]).map(|back| u64::MAX - back);
    let edges = (45..64).flat_map(|k| [(1u64 << k) - 1, 1 << k, (1 << k) + 1]);
    let sizes: Vec<u64> = top.chain(edges).filter(|&size| size > 1 << 45).collect();
    // What an index could count and no device has is a lack of memory.
    let beyond_memory = [64 * GIB + 1, 65 * GIB, 1 << 40, 1 << 45];
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.builder().maximum(64 * GIB).build().unwrap();
        let warm = pool.allocate(MIB).unwrap();
        free(&pool, warm).unwrap();
        let (before, calls, mut failures) = (machine.check(&pool), machine.sim.calls(FaultTarget::AnyCall), 0);
        for alignment in [1, 256, 2 * MIB] {
            for &size in &sizes {
                let error = pool.allocate_aligned(size, alignment).unwrap_err();
                assert!(error.is_invalid_argument() && error.invalid_free_reason().is_none(), "{size} at {alignment}: {error}");
                assert!(pool.allocate_buffer_aligned(size, alignment).unwrap_err().is_invalid_argument());
            }
            for size in beyond_memory {
                let error = pool.allocate_aligned(size, alignment).unwrap_err();
                assert!(error.is_out_of_memory(), "{size} at {alignment}: {error}");
                assert_eq!(error.numbers().unwrap().requested, size);
            }
            failures += 2 * sizes.len() as u64 + beyond_memory.len() as u64;
        }
        assert_only_failures(&before, &machine.check(&pool), failures);
        assert_eq!(machine.sim.calls(FaultTarget::AnyCall), calls, "{source:?}: the driver was called");
        let (a, b) = (pool.allocate(256).unwrap(), pool.allocate(256).unwrap());
        assert!(a.address().abs_diff(b.address()) >= 256);
        machine.finish(pool);
    }
}

/// A class search by shifting and rounding to powers of two goes wrong exactly at their edges.
#[test]
fn a_block_holds_what_was_asked_for_and_little_more_at_every_edge() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        let edges = (8..=31).flat_map(|k| [(1u64 << k) - 1, 1 << k, (1 << k) + 1, 3 << (k - 1)]);
        let mut sizes: Vec<u64> = [1, 2, 3, 7, 8, 9, 255].into_iter().chain(edges).collect();
        sizes.sort_unstable();
        let mut last = 0;
        for size in sizes {
            let address = pool.allocate(size).unwrap();
            let block = machine.check(&pool).live_bytes;
            let lost = if size <= KIB { 255 } else { (size / 4).min(16 * KIB - 1) };
            assert!((size..=size + lost).contains(&block), "{source:?}: {size} bytes get {block}");
            assert!(block >= last, "{source:?}: {size} bytes get less than fewer did");
            assert!(machine.is_usable(address, block), "{source:?}: {size} bytes");
            last = block;
            free(&pool, address).unwrap();
            assert_eq!(pool.statistics().live_bytes, 0);
        }
        machine.finish(pool);
    }
}

/// The last word of a bitmap is rarely full: a bit behind the last slot leads out of the slab, into a neighbour.
#[test]
fn a_slab_gives_exactly_its_slots_and_takes_them_back_in_any_order() {
    let machine = Machine::large(Source::Mapped(2 * MIB));
    let pool = machine.pool();
    for class in 0..pool.statistics().classes.len() {
        let slot_bytes = pool.statistics().classes[class].slot_bytes;
        let first = pool.allocate(slot_bytes).unwrap();
        let slab_bytes = pool.statistics().classes[class].slab_bytes;
        let slots = slab_bytes / slot_bytes;
        let mut blocks = vec![first];
        blocks.extend((1..slots).map(|_| pool.allocate(slot_bytes).unwrap()));
        assert_eq!(pool.statistics().classes[class].slabs, 1, "{slots} slots of {slot_bytes} bytes");
        let mut addresses: Vec<u64> = blocks.iter().map(|block| block.address()).collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] >= slot_bytes));
        assert!(addresses[addresses.len() - 1] + slot_bytes <= addresses[0] + slab_bytes);
        // One more is in another slab.
        let beyond = pool.allocate(slot_bytes).unwrap();
        assert_eq!(pool.statistics().classes[class].slabs, 2);
        assert!(beyond.address() >= addresses[0] + slab_bytes || beyond.address() + slot_bytes <= addresses[0]);
        free(&pool, beyond).unwrap();
        // The last slot goes first, and comes back.
        let last = DevicePtr::new(*addresses.last().unwrap());
        free(&pool, last).unwrap();
        assert_eq!(pool.allocate(slot_bytes).unwrap(), last);
        for block in blocks.iter().rev() {
            free(&pool, *block).unwrap();
        }
        assert_eq!(machine.check(&pool).classes[class].slabs, 0);
    }
    machine.finish(pool);
}

/// Where blocks above some size are cached in bins that are too wide, a request gets a freed block that is too small.
#[test]
fn a_freed_block_is_never_used_again_for_more_than_it_holds() {
    let sizes = [150 * MIB, 200 * MIB, 130 * MIB, 255 * MIB, 129 * MIB - 1];
    for source in [SOURCES[1], SOURCES[3], SOURCES[4], SOURCES[5]] {
        for growth in [0, 128 * MIB, GIB] {
            for order in permutations(sizes.len()).into_iter().step_by(7) {
                let machine = Machine::large(source);
                let pool = machine.builder().growth(growth).build().unwrap();
                let guard = pool.allocate_buffer(MIB).unwrap();
                for &index in &order {
                    let size = sizes[index];
                    let buffer = pool.allocate_buffer(size).unwrap();
                    // Another block of the same size, so that what is too small would show as an overlap.
                    let other = pool.allocate_buffer(size).unwrap();
                    assert!(machine.is_usable(buffer.address(), size) && machine.is_usable(other.address(), size));
                    assert!(buffer.address().address().abs_diff(other.address().address()) >= size, "{source:?} {order:?}");
                    assert!(pool.statistics().live_bytes >= 2 * size + MIB);
                }
                drop(guard);
                machine.finish(pool);
            }
        }
    }
}

/// `size + alignment - granule` wraps for alignments below the granule.
#[test]
fn small_alignments_cost_nothing() {
    for source in SOURCES {
        for shift in 0..=8 {
            for size in [0, 1, 31, 32, 255, 256, 257] {
                let machine = Machine::large(source);
                let pool = machine.pool();
                let address = pool.allocate_aligned(size, 1 << shift).unwrap();
                let statistics = machine.check(&pool);
                assert_eq!(statistics.live_bytes, size.next_multiple_of(256), "{source:?}: {size} at {}", 1 << shift);
                let pages = if size == 0 { 0 } else { pool.page_bytes() };
                let padding = if source.pads() { 16 * KIB } else { 0 };
                assert!((pages..=pages + padding).contains(&machine.held()), "{source:?}: {size} at {}", 1 << shift);
                free(&pool, address).unwrap();
                machine.finish(pool);
            }
        }
    }
}

/// Zero bytes are refused by drivers; where they get a real entry, two threads are given the same one.
#[test]
fn zero_bytes_are_no_block_however_many_ask() {
    for source in [SOURCES[1], SOURCES[3], SOURCES[6]] {
        let machine = Machine::large(source);
        let pool = machine.pool();
        let before = machine.check(&pool);
        let calls = machine.sim.calls(FaultTarget::AnyCall);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for turn in 0..10_000 {
                        let address = pool.allocate_aligned(0, 1 << (turn % 31)).unwrap();
                        assert_eq!(address, DevicePtr::NULL);
                        free(&pool, address).unwrap();
                        free(&pool, address).unwrap();
                        let buffer = pool.allocate_buffer(0).unwrap();
                        assert_eq!((buffer.address(), buffer.size()), (DevicePtr::NULL, 0));
                        if turn % 2 == 0 {
                            buffer.free().unwrap();
                        }
                    }
                });
            }
        });
        assert_eq!(machine.check(&pool), before);
        assert_eq!(machine.sim.calls(FaultTarget::AnyCall), calls);
        // An alignment is checked all the same.
        assert!(pool.allocate_aligned(0, 3).unwrap_err().is_invalid_argument());
        machine.finish(pool);
    }
}

/// Where only one of two numbers is rounded, an initial size equal to the maximum is refused.
#[test]
fn the_initial_size_may_be_the_maximum_whatever_it_is() {
    for source in SOURCES {
        let page = source.page_bytes();
        // A single page is not enough where alignment costs memory.
        let single = [page, page + 1, 2 * page - 1].into_iter().filter(|_| !source.pads());
        for bytes in single.chain([2 * page, 101_000_001, 101_000_002, 128 * MIB, 3 * page + 255]) {
            let machine = Machine::large(source);
            let pool = machine.builder().initial(bytes).maximum(bytes).build().unwrap();
            let capacity = bytes / page * page;
            assert_eq!(machine.check(&pool).capacity_bytes, Some(capacity));
            let short = if source.pads() { page } else { 0 };
            assert!(machine.held() <= capacity && machine.held() >= capacity - short, "{source:?}: {bytes}");
            // All of it is there to be had, and no more.
            let all = machine.check(&pool).largest_free_bytes;
            assert!(all >= capacity - short && pool.allocate(bytes + 1).unwrap_err().is_out_of_memory());
            let address = pool.allocate(all).unwrap();
            assert!(machine.is_usable(address, all));
            machine.finish(pool);
        }
    }
    let machine = Machine::large(SOURCES[1]);
    assert!(machine.builder().maximum(2 * MIB - 1).build().unwrap_err().is_invalid_argument());
    assert!(machine.builder().initial(8 * MIB + 1).maximum(8 * MIB).build().unwrap_err().is_invalid_argument());
    machine.sim.audit().unwrap();
}

/// An initial size off the granularity leaves a remainder that the maximum is then short of.
#[test]
fn the_maximum_is_reached_from_any_initial_size() {
    for source in SOURCES.into_iter().filter(|source| !source.pads() && source.page_bytes() <= 8 * MIB) {
        // Where pages are not mapped, what is left of a segment in use stays apart.
        let odd = source.maps_pages().then_some(33 * MIB);
        for initial in [0, 1, 1_000_192, 2 * MIB, 8 * MIB - 1, 32 * MIB].into_iter().chain(odd) {
            let machine = Machine::large(source);
            let pool = machine.builder().initial(initial).maximum(64 * MIB).build().unwrap();
            let blocks: Vec<DevicePtr> = (0..8)
                .map(|n| pool.allocate(8 * MIB).unwrap_or_else(|error| panic!("{source:?}, {initial} at first, block {n}: {error}")))
                .collect();
            assert_eq!(machine.held(), 64 * MIB, "{source:?}");
            assert!(pool.allocate(1).unwrap_err().is_out_of_memory());
            blocks.into_iter().for_each(|block| free(&pool, block).unwrap());
            machine.finish(pool);
        }
    }
}

/// Where the idle first block counts against the budget, a request for the whole maximum fails.
#[test]
fn idle_memory_makes_way_for_one_request_of_the_whole_maximum() {
    for source in SOURCES {
        let page = source.page_bytes();
        for (initial, pages) in [(1, 4), (1, 2), (3, 4), (1, 1), (2, 64)].into_iter().filter(|&(_, pages)| pages > 1 || !source.pads()) {
            let machine = Machine::large(source);
            let maximum = pages * page;
            let pool = machine.builder().initial(initial.min(pages) * page - 1).maximum(maximum).build().unwrap();
            let all = if source.pads() { maximum - page } else { maximum };
            let buffer = pool.allocate_buffer(all).unwrap_or_else(|error| panic!("{source:?}, {initial} of {pages}: {error}"));
            assert!(machine.is_usable(buffer.address(), all) && machine.check(&pool).peak_reserved_bytes <= maximum);
            assert!(machine.sim.peak_bytes(crate::support::DEVICE) <= maximum);
            drop(buffer);
            machine.finish(pool);
        }
    }
}

/// Nine tenths of a device that become all of it cannot be had.
#[test]
fn the_initial_size_takes_not_a_page_more() {
    for source in SOURCES.into_iter().filter(|source| !source.pads()) {
        let page = source.page_bytes();
        for (device, initial) in [(1000 * MIB, 900 * MIB), (1000 * MIB, 1000 * MIB / page * page), (33 * MIB, 32 * MIB)] {
            let machine = Machine::new(source, device);
            let pool = machine.builder().initial(initial).build().unwrap();
            assert_eq!(machine.held(), initial.next_multiple_of(page), "{source:?}: {initial}");
            let (before, calls) = (machine.check(&pool), machine.memory_calls());
            // It is one stretch, and history has not begun.
            assert_eq!((before.free_bytes, before.largest_free_bytes), (machine.held(), machine.held()));
            assert_eq!((before.allocations, before.deallocations, before.peak_live_bytes), (0, 0, 0));
            drop(pool.allocate_buffer(initial).unwrap());
            assert_eq!(machine.memory_calls(), calls);
            machine.finish(pool);
        }
        let machine = Machine::new(source, 32 * MIB);
        let error = machine.builder().initial(64 * MIB).build().unwrap_err();
        assert!(error.is_out_of_memory() && error.numbers().unwrap().requested == 64 * MIB, "{source:?}: {error}");
        machine.sim.audit().unwrap();
    }
}

/// A rule that doubles the pool asks for more than there is while enough is there.
#[test]
fn all_of_a_device_is_served_in_equal_parts() {
    for source in SOURCES.into_iter().filter(|source| !source.pads() && source.page_bytes() <= 4 * MIB) {
        for (initial, growth) in [(16 * MIB, 0), (16 * MIB, 16 * MIB), (0, 32 * MIB), (2 * MIB, 64 * MIB), (30 * MIB, GIB)] {
            let machine = Machine::new(source, 32 * MIB);
            let pool = machine.builder().initial(initial).growth(growth).build().unwrap();
            let count = if source.maps_pages() || initial % (4 * MIB) == 0 { 8 } else { 7 };
            let blocks: Vec<_> = (0..count)
                .map(|n| {
                    pool.allocate_buffer(4 * MIB)
                        .unwrap_or_else(|error| panic!("{source:?}, {initial} at first, growing by {growth}, block {n}: {error}"))
                })
                .collect();
            drop(blocks);
            machine.finish(pool);
        }
    }
}

/// A growth step is a wish: what fails with it must be tried with less, down to what is needed.
#[test]
fn growth_steps_down_to_what_is_left() {
    for source in SOURCES.into_iter().filter(|source| source.page_bytes() <= 4 * MIB) {
        for (left, step) in [(40, 512), (4, 512), (6, 7), (40, 40), (1000, 512), (511, 512)] {
            let machine = Machine::new(source, left * MIB + if source.pads() { 16 * KIB } else { 0 });
            let pool = machine.builder().growth(step * MIB).build().unwrap();
            let buffer = pool.allocate_buffer(3 * MIB).unwrap_or_else(|error| panic!("{source:?}: {step} of {left} MiB: {error}"));
            // At least half of what the wish or the device allows.
            let most = (step.min(left) * MIB).max(4 * MIB);
            assert!(machine.held() >= most / 2 - 2 * MIB && machine.held() <= most + 2 * MIB, "{source:?}: {step} of {left} MiB");
            assert!(machine.takings() <= 600);
            drop(buffer);
            machine.finish(pool);
        }
        // A maximum is no reason to fail either.
        let machine = Machine::large(source);
        let pool = machine.builder().growth(512 * MIB).maximum(10 * MIB).build().unwrap();
        let _buffer = pool.allocate_buffer(3 * MIB).unwrap();
        assert!(machine.check(&pool).reserved_bytes <= 10 * MIB);
    }
}

/// A wish that no machine can grant is still a wish: counted in pages, it must not wrap to something else.
#[test]
fn growth_may_be_any_number() {
    for source in SOURCES {
        for growth in [1 << 44, 1 << 53, (1 << 53) + 1, 3 << 52, 1 << 63, u64::MAX - 1, u64::MAX] {
            let machine = Machine::new(source, 256 * MIB);
            let pool = machine.builder().growth(growth).build().unwrap();
            let buffer = pool.allocate_buffer(1).unwrap_or_else(|error| panic!("{source:?}: {growth}: {error}"));
            assert!(machine.held() >= 64 * MIB, "{source:?}: {growth}: {} bytes", machine.held());
            drop(buffer);
            machine.finish(pool);
        }
    }
}

/// A lookup that trusts an index up to the capacity, not to what was ever given out, frees what nobody owns.
#[test]
fn slots_that_were_never_allocated_cannot_be_freed() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        for class in 0..pool.statistics().classes.len() {
            let slot_bytes = pool.statistics().classes[class].slot_bytes;
            let blocks: Vec<DevicePtr> = (0..3).map(|_| pool.allocate(slot_bytes).unwrap()).collect();
            let slots = pool.statistics().classes[class].slab_bytes / slot_bytes;
            let before = machine.check(&pool);
            let mut refused = 0;
            for slot in (3..slots).chain([slots, slots + 1]) {
                let address = blocks[0].offset(slot * slot_bytes);
                let error = free(&pool, address).unwrap_err();
                assert_eq!(error.invalid_free_reason(), Some(InvalidFree::NotLive), "{source:?}: slot {slot} of {slot_bytes} bytes");
                refused += 1;
            }
            let mut expected = before;
            expected.refused_frees += refused;
            assert_eq!(machine.check(&pool), expected);
            blocks.into_iter().for_each(|block| free(&pool, block).unwrap());
        }
        machine.finish(pool);
    }
}

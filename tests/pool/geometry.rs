//! Alignment, and what belongs together: blocks, padding, segments.

use crate::support::{DEVICE, Draw, MAPPED, Machine, Owners, SOURCES, Source, free, permutations};
use std::sync::{Mutex, mpsc};
use std::thread;
use vrampool::DevicePtr;
use vrampool::driver::sim::PlainPlacement;
use vrampool::driver::{Call, MemoryKind};
use vrampool::units::{GIB, KIB, MIB};

/// An alignment above the usual is easily honoured for new memory and forgotten where a freed block is used again.
#[test]
fn every_alignment_holds_on_new_memory_and_on_memory_used_before() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        for _ in 0..3 {
            let mut blocks = Vec::new();
            for shift in (0..=30).chain([9, 12, 16, 21, 22]) {
                let alignment = 1u64 << shift;
                // The largest alignment costs a segment of its own size where pages are not mapped.
                for size in [1, 257, 16 * KIB, 16 * KIB + 1, 3 * MIB] {
                    let address = pool.allocate_aligned(size, alignment).unwrap_or_else(|error| panic!("{source:?}: {error}"));
                    assert!(address.is_aligned_to(alignment.max(256)), "{source:?}: {size} bytes at {alignment}: {address}");
                    assert!(machine.is_usable(address, size), "{source:?}: {size} bytes at {alignment}");
                    blocks.push((address, size));
                }
            }
            blocks.sort_unstable();
            assert!(blocks.windows(2).all(|pair| pair[0].0.offset(pair[0].1) <= pair[1].0), "{source:?}");
            machine.check(&pool);
            for (address, _) in blocks.iter().step_by(2).chain(blocks.iter().skip(1).step_by(2)) {
                free(&pool, *address).unwrap();
            }
        }
        machine.finish(pool);
    }
}

/// What is freed at a lower alignment must not be given to a request for a higher one.
#[test]
fn a_block_freed_at_one_alignment_is_looked_at_again_for_the_next() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.builder().alignment(512).build().unwrap();
        let mut draw = Draw(7);
        let owners = Owners::default();
        let mut live = Vec::new();
        for turn in 0..3000 {
            if live.len() < 40 && draw.below(3) > 0 {
                let size = draw.size(22);
                let alignment = 1 << draw.below(25);
                let address = pool.allocate_aligned(size, alignment).unwrap();
                assert!(address.is_aligned_to(alignment.max(512)), "{source:?}, turn {turn}: {size} at {alignment}");
                owners.take(address, size);
                live.push(address);
            } else if !live.is_empty() {
                let address = live.swap_remove(draw.below(live.len() as u64) as usize);
                owners.give(address);
                free(&pool, address).unwrap();
            }
        }
        machine.finish(pool);
    }
}

#[test]
fn an_alignment_that_is_none_is_an_error() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        for alignment in [0, 3, 5, 6, 255, 257, 384, GIB + 1, 2 * GIB, 1 << 62, 1 << 63, (1 << 63) + 1, u64::MAX] {
            for size in [0, 1, MIB, 1 << 40] {
                assert!(pool.allocate_aligned(size, alignment).unwrap_err().is_invalid_argument(), "{size} at {alignment}");
                assert!(pool.allocate_buffer_aligned(size, alignment).unwrap_err().is_invalid_argument());
            }
        }
        assert_eq!(machine.memory_calls(), 0);
        for alignment in [0, 1, 128, 255, 257, 1024, 1 << 63] {
            assert!(machine.builder().alignment(alignment).build().unwrap_err().is_invalid_argument());
        }
        machine.finish(pool);
    }
}

/// A free that works its block's extent out from the defaults unmaps, or gives back, another range than was taken. The
/// simulated device refuses any such call.
#[test]
fn memory_goes_back_in_the_pieces_in_which_it_came() {
    for source in SOURCES {
        for order in permutations(4) {
            let machine = Machine::large(source);
            let pool = machine.builder().growth(9 * MIB).build().unwrap();
            let requests = [(3 * MIB, 4 * MIB), (5 * MIB, 1), (257, 512), (65 * MIB, 32 * MIB)];
            let blocks = requests.map(|(size, alignment)| pool.allocate_aligned(size, alignment).unwrap());
            for &index in &order {
                free(&pool, blocks[index]).unwrap();
            }
            let statistics = machine.check(&pool);
            assert_eq!((statistics.live_bytes, statistics.slab_idle_bytes), (0, 0));
            if order[0] % 2 == 0 {
                assert_eq!(pool.trim(0).unwrap(), 0, "{source:?}");
            }
            machine.finish(pool);
        }
    }
}

/// Alignment padding that is not part of what is freed is lost a little at a time.
#[test]
fn padding_comes_back_with_its_block() {
    for source in
        [MAPPED[1], Source::Plain(MemoryKind::Device, PlainPlacement::Odd), Source::Plain(MemoryKind::Pinned, PlainPlacement::Driver)]
    {
        let machine = Machine::large(source);
        let pool = machine.builder().initial(64 * MIB).maximum(64 * MIB).build().unwrap();
        let (before, calls) = (machine.check(&pool), machine.memory_calls());
        let mut draw = Draw(1);
        for turn in 0..100_000 {
            let requests = match turn % 4 {
                0..3 => [(257, 512), (33, 1024)],
                _ => [(20 * KIB, 32 * KIB), (3 * MIB + 1, 4 * MIB)],
            };
            let mut blocks = requests.map(|(size, alignment)| pool.allocate_aligned(size, alignment).unwrap());
            if draw.below(2) == 0 {
                blocks.reverse();
            }
            blocks.into_iter().for_each(|block| free(&pool, block).unwrap());
        }
        let after = machine.check(&pool);
        assert_eq!((before.free_bytes, before.largest_free_bytes), (after.free_bytes, after.largest_free_bytes), "{source:?}");
        assert_eq!(machine.memory_calls(), calls);
        // The cheapest proof: all of it is one block again.
        let all = pool.allocate(before.largest_free_bytes).unwrap();
        free(&pool, all).unwrap();
        machine.finish(pool);
    }
}

fn plain(placement: PlainPlacement) -> impl Iterator<Item = Source> {
    [MemoryKind::Device, MemoryKind::Pinned, MemoryKind::Managed].into_iter().map(move |kind| Source::Plain(kind, placement))
}

/// Two driver allocations that happen to touch are still two: a block across them is memory of neither.
#[test]
fn allocations_of_the_driver_that_touch_are_never_joined() {
    for source in plain(PlainPlacement::Adjacent) {
        // Which pieces begin at a multiple of a grain depends on what lies before them.
        for before in [0, 256, 16 * KIB, 2 * MIB] {
            let machine = Machine::large(source);
            let device = machine.device();
            let kind = machine.builder().build().unwrap().kind();
            let earlier = (before > 0).then(|| device.driver().mem_alloc(DEVICE, kind, before).unwrap());
            let pool = machine.pool();
            let pair = [pool.allocate(32 * MIB).unwrap(), pool.allocate(32 * MIB).unwrap()];
            assert!(pair[0].address().abs_diff(pair[1].address()) <= 32 * MIB + 16 * KIB, "the segments do not touch");
            pair.into_iter().for_each(|block| free(&pool, block).unwrap());
            pool.check().unwrap();
            assert!(pool.statistics().largest_free_bytes < 64 * MIB);
            let takings = machine.takings();
            let joint = pool.allocate(64 * MIB).unwrap();
            assert!(machine.is_usable(joint, 64 * MIB), "{source:?}: a block across two allocations");
            assert!(machine.takings() > takings);
            free(&pool, joint).unwrap();
            assert_eq!(pool.trim(0).unwrap(), 0);
            assert_eq!(machine.held(), before);
            drop(pool);
            if let Some(earlier) = earlier {
                device.driver().mem_free(DEVICE, kind, earlier).unwrap();
            }
            machine.sim.audit().unwrap();
        }
    }
}

/// A merge that stops early, or depends on which neighbour comes first, leaves pieces behind.
#[test]
fn what_is_left_does_not_depend_on_the_order_of_frees() {
    for source in SOURCES {
        // Equal parts, unequal parts, and parts that do not end on grains or pages.
        for parts in [[8 * MIB; 4], [MIB, 5 * MIB, 9 * MIB, 17 * MIB], [8 * MIB - 1, 3 * MIB + 5, 100 * KIB, 20 * MIB - 3]] {
            let mut expected = None;
            for order in permutations(4) {
                let machine = Machine::large(source);
                let pool =
                    machine.builder().initial(32 * MIB + source.page_bytes()).maximum(32 * MIB + source.page_bytes()).build().unwrap();
                let start = machine.check(&pool).largest_free_bytes;
                let calls = machine.memory_calls();
                let blocks = parts.map(|size| pool.allocate(size).unwrap());
                for &index in &order {
                    free(&pool, blocks[index]).unwrap();
                }
                let statistics = machine.check(&pool);
                assert_eq!(statistics.largest_free_bytes, start, "{source:?} {order:?}");
                assert_eq!(*expected.get_or_insert_with(|| statistics.clone()), statistics, "{source:?} {order:?}");
                let whole = pool.allocate(start).unwrap();
                free(&pool, whole).unwrap();
                assert_eq!(machine.memory_calls(), calls);
                machine.finish(pool);
            }
        }
    }
}

/// A segment that is no power of two long must not be taken for the next power of two.
#[test]
fn a_segment_of_any_length_is_used_whole_and_never_beyond_its_end() {
    for source in SOURCES {
        let page = source.page_bytes();
        // A single page is not enough where alignment costs memory.
        for pages in [1, 3, 5, 7, 24, 31, 33].into_iter().filter(|&pages| pages > 1 || !source.pads()) {
            let machine = Machine::large(source);
            let length = pages * page;
            let pool = machine.builder().initial(length).maximum(length).build().unwrap();
            let whole = machine.check(&pool).largest_free_bytes;
            assert!(whole == length || (source.pads() && whole == length - page), "{source:?}: {pages} pages");
            let calls = machine.memory_calls();
            let next_power = whole.checked_next_power_of_two().unwrap();
            let block = pool.allocate(whole).unwrap();
            assert!(machine.is_usable(block, whole));
            free(&pool, block).unwrap();
            assert_eq!(machine.memory_calls(), calls);
            if next_power > length {
                assert!(pool.allocate(next_power).unwrap_err().is_out_of_memory());
                assert!(machine.held() <= length);
            }
            // In two parts, the larger first or last.
            for first in [whole / 3 / (16 * KIB) * (16 * KIB), whole - 16 * KIB] {
                let blocks: [DevicePtr; 2] = [first, whole - first].map(|size| pool.allocate(size.max(1)).unwrap());
                blocks.into_iter().for_each(|block| free(&pool, block).unwrap());
                assert_eq!(machine.check(&pool).largest_free_bytes, whole);
            }
            machine.finish(pool);
        }
    }
}

/// The driver may give an address again as soon as it has taken it back, before the thread that gave it back has noted
/// that: the note must not strike out the new owner.
#[test]
fn a_segment_at_the_address_of_one_that_is_just_going_back_is_a_segment_of_its_own() {
    let sources = plain(PlainPlacement::Driver).chain(plain(PlainPlacement::Adjacent)).chain(plain(PlainPlacement::Odd));
    for source in sources {
        // As long as the one that went, shorter, and across two of them.
        for sizes in [&[4 * MIB][..], &[2 * MIB], &[MIB, MIB, 2 * MIB], &[8 * MIB], &[5 * MIB, 3 * MIB]] {
            let machine = Machine::large(source);
            let pool = machine.pool();
            let segments: Vec<DevicePtr> = (0..3).map(|_| pool.allocate(4 * MIB).unwrap()).collect();
            let (begun, amid) = mpsc::channel();
            let (proceed, gate) = mpsc::channel();
            let state = Mutex::new((0, begun, gate));
            machine.sim.set_hook(move |call| {
                if matches!(call, Call::MemFree | Call::MemFreeHost) {
                    let mut state = state.lock().unwrap();
                    state.0 += 1;
                    // Two segments are gone, the third is going.
                    if state.0 == 3 {
                        state.1.send(()).unwrap();
                        state.2.recv().unwrap();
                    }
                }
            });
            segments.iter().for_each(|&segment| free(&pool, segment).unwrap());
            let blocks: Vec<(DevicePtr, u64)> = thread::scope(|scope| {
                let trim = scope.spawn(|| pool.trim(0).unwrap());
                amid.recv().unwrap();
                let blocks: Vec<_> = sizes.iter().map(|&size| (pool.allocate(size).unwrap(), size)).collect();
                let again = pool.allocate(1).unwrap();
                free(&pool, again).unwrap();
                proceed.send(()).unwrap();
                assert!(trim.join().unwrap() > 0);
                blocks
            });
            machine.sim.clear_hook();
            let statistics = machine.check(&pool);
            assert_eq!(statistics.live_blocks, sizes.len() as u64);
            assert!(blocks.iter().any(|(block, _)| segments.contains(block)), "{source:?}: the test wants an address again");
            for (block, size) in blocks {
                assert!(machine.is_usable(block, size));
                free(&pool, block).unwrap_or_else(|error| panic!("{source:?}, {sizes:?}: {error}"));
            }
            machine.finish(pool);
        }
    }
}

/// A pool numbers 32 TiB of memory. Behind that there is no place for what the driver gives, however often it is asked.
#[test]
fn a_pool_is_full_where_its_numbers_end() {
    for placement in [PlainPlacement::Driver, PlainPlacement::Odd] {
        let machine = Machine::with(Source::Mapped(GIB), 64 << 40, |config| config.placement(placement));
        let pool = machine.pool();
        // Four times as many addresses, the usual reservation, have no place.
        let mut held = 10u64 << 40;
        pool.allocate(held).unwrap();
        for size in [1 << 40, 64 * GIB, GIB] {
            loop {
                match pool.allocate(size) {
                    Ok(_) => held += size,
                    Err(error) => break assert!(error.is_out_of_memory(), "{placement:?}: {error}"),
                }
            }
        }
        assert!(held > 31 << 40 && held <= 32 << 40, "{placement:?}: {held}");
        machine.finish(pool);
    }
}

//! Fragmentation, growth that fails half-way, scarce addresses and handles, and memory going back.

use crate::support::{DEVICE, Draw, MAPPED, Machine, SOURCES, Source, free};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use vrampool::driver::Call;
use vrampool::error::CuResult;
use vrampool::units::{GIB, KIB, MIB};
use vrampool::{DeviceBuffer, Pool};

/// Powers of two waste up to half: a variable could never take more than half of a device.
#[test]
fn what_a_block_does_not_use_of_a_power_of_two_is_there_for_others() {
    for source in SOURCES {
        // Where pages are not mapped, a segment is a whole number of pages; held from the start, it makes no difference.
        for (capacity, sizes) in [(64, &[33, 31][..]), (96, &[33, 33]), (128, &[65, 63]), (96, &[1, 65, 30]), (64, &[63, 1])] {
            let machine = Machine::large(source);
            let page = if source.pads() { source.page_bytes() } else { 0 };
            let mut builder = machine.builder().maximum(capacity * MIB + page);
            if !source.maps_pages() {
                builder = builder.initial(capacity * MIB + page);
            }
            let pool = builder.build().unwrap();
            let buffers: Vec<DeviceBuffer> = sizes
                .iter()
                .map(|size| {
                    pool.allocate_buffer(size * MIB).unwrap_or_else(|error| panic!("{source:?}: {size} MiB of {capacity}: {error}"))
                })
                .collect();
            assert_eq!(machine.check(&pool).live_bytes, sizes.iter().sum::<u64>() * MIB);
            assert!(machine.held() <= capacity * MIB + page);
            drop(buffers);
            machine.finish(pool);
        }
    }
}

/// Growth by several handles that stops half-way leaves created, mapped or inaccessible pages; a roll-back that fails as
/// well must not make it worse, nor end the process in a destructor.
#[test]
fn growth_that_fails_at_any_handle_and_any_step_leaves_a_working_pool() {
    let steps = [Call::MemCreate, Call::MemMap, Call::MemSetAccess];
    let undoing = [None, Some(Call::MemUnmap), Some(Call::MemRelease)];
    for source in MAPPED {
        let page = source.page_bytes();
        for (step, undo) in steps.into_iter().flat_map(|step| undoing.map(|undo| (step, undo))) {
            for (at, again) in (0..5).flat_map(|at| (0..3).map(move |again| (at, again))) {
                for code in [CuResult::ERROR_OUT_OF_MEMORY, CuResult::ERROR_UNKNOWN] {
                    let machine = Machine::new(source, 8 * page);
                    let pool = machine.pool();
                    let earlier = pool.allocate_buffer(page).unwrap();
                    machine.sim.fail(step, at, code);
                    if let Some(undo) = undo {
                        // The roll-back fails too, at its first call or a later one.
                        machine.sim.fail(undo, again, CuResult::ERROR_INVALID_VALUE);
                    }
                    let name = format!("{source:?}: {step:?} {at} with {code}, {undo:?} {again}");
                    match pool.allocate_buffer(5 * page) {
                        // A refusal for lack of memory is learnt from: fewer or other pieces are tried.
                        Ok(buffer) => assert!(machine.is_usable(buffer.address(), 5 * page) && code == CuResult::ERROR_OUT_OF_MEMORY),
                        Err(error) if code == CuResult::ERROR_UNKNOWN => {
                            assert!(error.is_driver() && error.code() == Some(code), "{name}: {error}")
                        }
                        Err(error) => assert!(error.is_out_of_memory(), "{name}: {error}"),
                    }
                    machine.sim.clear_faults();
                    machine.check(&pool);
                    let small = pool.allocate_buffer(MIB).unwrap();
                    assert!(machine.is_usable(small.address(), MIB), "{name}");
                    // Nothing is lost: all that the device has can still be had.
                    drop(small);
                    let rest = pool.allocate_buffer(7 * page).unwrap_or_else(|error| panic!("{name}: {error}"));
                    assert!(machine.is_usable(rest.address(), 7 * page), "{name}");
                    machine.check(&pool);
                    drop((earlier, rest));
                    assert_eq!(pool.trim(0).unwrap(), 0, "{name}");
                    machine.finish(pool);
                }
            }
        }
    }
}

fn fill(pool: &Pool, size: u64, most: usize) -> Vec<DeviceBuffer> {
    std::iter::from_fn(|| pool.allocate_buffer(size).ok()).take(most).collect()
}

/// A reservation of a fixed great size fails where the address space is small, and takes the pool with it.
#[test]
fn a_pool_makes_do_with_the_addresses_that_there_are() {
    for source in MAPPED {
        let page = source.page_bytes();
        for space in [64 * GIB, 16 * GIB, GIB, 3 * page, page] {
            let machine = Machine::with(source, 140 * GIB, |config| config.address_space(space));
            let pool = machine.pool();
            let size = (space / 32).max(page);
            let buffers = fill(&pool, size, 1000);
            assert!(buffers.iter().all(|buffer| machine.is_usable(buffer.address(), size)));
            let live = buffers.len() as u64 * size;
            assert!(live >= space / 8 * 7, "{source:?}: {live} bytes in {space} bytes of addresses");
            let statistics = machine.check(&pool);
            assert_eq!(statistics.failed_allocations, 1);
            // Smaller blocks come out of the same addresses once they are free.
            drop(buffers);
            let buffers = fill(&pool, size / 4, 1000);
            assert!(buffers.len() as u64 * (size / 4) >= live);
            drop(buffers);
            machine.finish(pool);
        }
    }
}

/// Where no page can be mapped, memory comes in plain allocations, on the same terms.
#[test]
fn without_virtual_memory_management_a_pool_works_all_the_same() {
    for source in SOURCES.into_iter().filter(|source| !source.maps_pages()) {
        // What alignment may cost comes on top.
        let machine = Machine::new(source, GIB + 32 * 16 * KIB);
        let pool = machine.pool();
        let buffers = fill(&pool, 31 * MIB, 100);
        assert!(buffers.len() == 32, "{source:?}: {}", buffers.len());
        assert_eq!(machine.sim.calls(Call::MemAddressReserve), 0);
        drop(buffers);
        machine.check(&pool);
        machine.finish(pool);
    }
}

/// A reservation many times the device's memory, once for each pool of a process, uses up the address space.
#[test]
fn a_hundred_pools_fit_in_one_address_space() {
    let machine = Machine::new(MAPPED[1], 140 * GIB);
    let pools: Vec<Pool> = (0..100).map(|_| machine.pool()).collect();
    for turn in 0..3 {
        for (index, pool) in pools.iter().enumerate() {
            let address = pool.allocate(100 * MIB).unwrap_or_else(|error| panic!("turn {turn}, pool {index}: {error}"));
            assert!(machine.is_usable(address, 100 * MIB));
        }
    }
    assert_eq!(machine.held(), 300 * 100 * MIB);
    for pool in pools {
        pool.check().unwrap();
    }
    machine.sim.audit().unwrap();
}

/// A handle for each page runs into the driver's limit of handles long before memory runs out, and that looks like a
/// lack of memory.
#[test]
fn large_requests_are_served_within_a_limit_of_handles() {
    for source in MAPPED {
        for size in [32 * MIB, 33 * MIB, 47 * MIB, 64 * MIB, 100 * MIB, 511 * MIB, GIB, 4 * GIB] {
            let machine = Machine::with(source, 140 * GIB, |config| config.handle_limit(1000));
            let pool = machine.pool();
            let count = (4 * GIB).div_ceil(size);
            let buffers: Vec<DeviceBuffer> = (0..count)
                .map(|n| pool.allocate_buffer(size).unwrap_or_else(|error| panic!("{source:?}: {size} bytes, block {n}: {error}")))
                .collect();
            assert!(machine.sim.live_handles() <= 1000);
            assert!(buffers.iter().all(|buffer| machine.is_usable(buffer.address(), size)));
            drop(buffers);
            machine.finish(pool);
        }
    }
}

/// At the last handles, one large one serves where several small ones would not.
#[test]
fn a_request_takes_fewer_handles_where_many_cannot_be_had() {
    for source in MAPPED {
        let page = source.page_bytes();
        for limit in 1..=6 {
            let machine = Machine::with(source, 64 * GIB, |config| config.handle_limit(limit));
            let pool = machine.pool();
            let buffer = pool.allocate_buffer(16 * page).unwrap_or_else(|error| panic!("{source:?}: {limit} handles: {error}"));
            assert!(machine.is_usable(buffer.address(), 16 * page));
            machine.check(&pool);
            drop(buffer);
            machine.finish(pool);
        }
    }
}

/// Small handles that lie idle make way for large ones where the driver gives no more, and the limit is remembered.
#[test]
fn idle_handles_are_consolidated_where_no_more_can_be_had() {
    for source in MAPPED {
        let page = source.page_bytes();
        let machine = Machine::with(source, 4096 * page, |config| config.handle_limit(1000));
        let pool = machine.pool();
        let mut small: Vec<DeviceBuffer> = (0..1000).map(|_| pool.allocate_buffer(page).unwrap()).collect();
        assert_eq!(machine.sim.live_handles(), 1000);
        let kept = small.swap_remove(500);
        drop(small);
        let large: Vec<DeviceBuffer> =
            (0..4).map(|n| pool.allocate_buffer(512 * page).unwrap_or_else(|error| panic!("{source:?}: block {n}: {error}"))).collect();
        machine.check(&pool);
        let created = machine.sim.calls(Call::MemCreate);
        let more = pool.allocate_buffer(1024 * page).unwrap();
        assert_eq!(machine.sim.calls(Call::MemCreate) - created, 1, "{source:?}: what was refused is not asked for again");
        drop((kept, large, more));
        machine.finish(pool);
    }
}

/// Who reads that memory ran out, while most of it is free, looks in the wrong place.
#[test]
fn a_lack_of_handles_does_not_read_like_a_lack_of_memory() {
    let error = |handle_limit, size| {
        let machine = Machine::with(MAPPED[1], 64 * MIB, |config| config.handle_limit(handle_limit));
        let pool = machine.pool();
        let _held = pool.allocate_buffer(8 * MIB).unwrap();
        let error = pool.allocate(size).unwrap_err();
        assert!(error.is_out_of_memory() && error.code() == Some(CuResult::ERROR_OUT_OF_MEMORY));
        error
    };
    let (handles, memory) = (error(4, 40 * MIB), error(1000, 57 * MIB));
    assert_eq!(handles.numbers().unwrap().driver_free, Some(56 * MIB));
    assert_eq!(memory.numbers().unwrap().driver_free, Some(56 * MIB));
    assert!(handles.to_string().contains("handles"), "{handles}");
    assert!(!memory.to_string().contains("handles"), "{memory}");
}

/// The driver's rules of mapping — no offset, whole mappings, its granularity — are enforced by the simulated device:
/// one broken rule is a failed call.
#[test]
fn mixed_work_keeps_the_drivers_rules_at_every_granularity() {
    for source in SOURCES {
        for seed in 0..3 {
            let machine = Machine::new(source, 40 * source.page_bytes());
            let pool = machine.builder().growth(seed * 3 * source.page_bytes()).build().unwrap();
            let mut draw = Draw(seed);
            let mut live: Vec<DeviceBuffer> = Vec::new();
            for _ in 0..1500 {
                match draw.below(16) {
                    0 => _ = pool.trim(draw.below(20) * source.page_bytes()).unwrap(),
                    1..=8 => {
                        let size = draw.size(26);
                        match pool.allocate_buffer_aligned(size, 1 << draw.below(23)) {
                            Ok(buffer) => {
                                assert!(machine.is_usable(buffer.address(), size), "{source:?}: {size}");
                                live.push(buffer);
                            }
                            Err(error) => assert!(error.is_out_of_memory(), "{source:?}: {error}"),
                        }
                    }
                    _ if live.is_empty() => {}
                    _ => live.swap_remove(draw.below(live.len() as u64) as usize).free().unwrap(),
                }
                assert_eq!(pool.statistics().reserved_bytes, machine.held(), "{source:?}");
            }
            assert!(machine.check(&pool).peak_reserved_bytes >= 2 * source.page_bytes());
            drop(live);
            machine.finish(pool);
        }
    }
}

/// A trim that calls itself, or waits for what never comes, hangs on an empty pool.
#[test]
fn a_trim_ends_whatever_there_is_and_whoever_calls() {
    for source in SOURCES {
        let machine = Machine::new(source, 16 * source.page_bytes());
        let inside: Arc<OnceLock<Pool>> = Arc::default();
        let calls = Arc::new(AtomicU64::new(0));
        let (seen, counter) = (Arc::clone(&inside), Arc::clone(&calls));
        let pool = machine
            .builder()
            .on_out_of_memory(move |numbers| {
                let pool = seen.get().unwrap();
                assert_eq!(pool.trim(0).unwrap(), numbers.live);
                counter.fetch_add(1, Ordering::Relaxed) == 0
            })
            .build()
            .unwrap();
        inside.set(pool.clone()).unwrap();
        // Empty, and empty again; then with one block that is live, then free.
        for to in [0, 1, u64::MAX] {
            assert_eq!(pool.trim(to).unwrap(), 0);
        }
        let block = pool.allocate(2 * source.page_bytes()).unwrap();
        let held = machine.held();
        for to in [0, 1, held - 1, held, u64::MAX] {
            assert_eq!(pool.trim(to).unwrap(), held, "{source:?}");
        }
        // In the callback; it is asked once more after it has said that it helped.
        if source.pads() {
            // What is lost to alignment is held and not live.
            assert!(held >= 2 * source.page_bytes());
        } else {
            assert!(pool.allocate(15 * source.page_bytes()).unwrap_err().is_out_of_memory());
            assert_eq!(calls.load(Ordering::Relaxed), 2);
        }
        free(&pool, block).unwrap();
        assert_eq!(pool.trim(held).unwrap(), held);
        assert_eq!(pool.trim(0).unwrap(), 0);
        assert_eq!(pool.trim(0).unwrap(), 0);
        machine.check(&pool);
        assert!(machine.memory_calls() < 200);
        // The callback's handle would keep the pool.
        drop(pool);
    }
}

/// Of two trims at once, the second must neither wait for ever nor give back the same memory again.
#[test]
fn a_trim_during_a_trim_finds_nothing_to_do() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.builder().initial(4 * source.page_bytes()).build().unwrap();
        let (amid, begun) = mpsc::sync_channel::<()>(0);
        let (proceed, gate) = mpsc::sync_channel::<()>(0);
        let gate = std::sync::Mutex::new(Some((amid, gate)));
        machine.sim.set_hook(move |call| {
            let first = if matches!(call, Call::MemUnmap | Call::MemFree | Call::MemFreeHost) { gate.lock().unwrap().take() } else { None };
            if let Some((amid, gate)) = first {
                amid.send(()).unwrap();
                gate.recv().unwrap();
            }
        });
        thread::scope(|scope| {
            let first = scope.spawn(|| pool.trim(0).unwrap());
            begun.recv().unwrap();
            let (calls, held) = (machine.memory_calls(), machine.held());
            // The first trim's memory is held until the driver has taken it back.
            assert_eq!(pool.trim(0).unwrap(), held, "{source:?}");
            assert_eq!(machine.memory_calls(), calls);
            proceed.send(()).unwrap();
            assert_eq!(first.join().unwrap(), 0);
        });
        machine.sim.clear_hook();
        machine.finish(pool);
    }
}

/// A pool that never shrinks starves its neighbours on the device.
#[test]
fn a_trim_gives_back_all_that_is_wholly_free() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        for (count, size) in [(1024, MIB), (20_000, 1000), (40, 25 * MIB)] {
            let buffers: Vec<DeviceBuffer> = (0..count).map(|_| pool.allocate_buffer(size).unwrap()).collect();
            let held = machine.held();
            // In steps: never below what was asked, but by less than a piece.
            drop(buffers);
            assert_eq!(machine.check(&pool).reserved_bytes, held, "nothing goes back unasked");
            let half = pool.trim(held / 2).unwrap();
            assert!(half <= held / 2 && half + 64 * MIB > held / 2, "{source:?}: {half} of {held}");
            assert_eq!(pool.trim(0).unwrap(), 0, "{source:?}");
            assert_eq!((machine.held(), machine.pieces(), machine.sim.live_handles()), (0, 0, 0));
            machine.check(&pool);
        }
        machine.finish(pool);
    }
}

#[test]
fn one_small_block_keeps_one_piece_and_no_more() {
    for source in SOURCES {
        // The block is the lowest, the highest, or in the middle.
        for position in 0..3 {
            let machine = Machine::large(source);
            let pool = machine.pool();
            let mut buffers: Vec<DeviceBuffer> = (0..1024).map(|_| pool.allocate_buffer(MIB).unwrap()).collect();
            buffers.sort_by_key(DeviceBuffer::address);
            drop(buffers.remove([0, 512, 1023][position]));
            let kept = pool.allocate_buffer(256).unwrap();
            drop(buffers);
            let held = pool.trim(0).unwrap();
            assert_eq!((machine.pieces(), held), (1, machine.held()), "{source:?}");
            let padding = if source.pads() { 16 * KIB } else { 0 };
            assert!(held <= source.page_bytes() + padding, "{source:?}: {held}");
            assert!(machine.is_usable(kept.address(), 256));
            drop(kept);
            assert_eq!(pool.trim(0).unwrap(), 0);
            machine.finish(pool);
        }
    }
}

/// Memory of the host is not a matter of how much of the device's memory is free.
#[test]
fn host_memory_is_not_judged_by_what_the_device_has_left() {
    for source in
        SOURCES.into_iter().filter(|source| matches!(source, Source::Plain(kind, _) if *kind != vrampool::driver::MemoryKind::Device))
    {
        let machine = Machine::with(source, 20 * MIB, |config| config.capacity(GIB).other_process(GIB));
        assert_eq!(machine.device().driver().memory_info(DEVICE).unwrap().free_bytes, 0);
        let pool = machine.builder().growth(64 * MIB).build().unwrap();
        let blocks = [4 * MIB, 6 * MIB].map(|size| pool.allocate(size).unwrap());
        blocks.into_iter().for_each(|block| free(&pool, block).unwrap());
        // Idle memory makes way, though the device has nothing to give.
        let buffer = pool.allocate_buffer(16 * MIB).unwrap_or_else(|error| panic!("{source:?}: {error}"));
        drop(buffer);
        machine.finish(pool);
    }
}

/// Trimming to a size is no reason to go below it.
#[test]
fn a_trim_keeps_what_it_may_keep() {
    for source in MAPPED {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let pool = machine.pool();
        drop([0; 5].map(|_| pool.allocate_buffer(page).unwrap()));
        for (to, held) in [(5 * page, 5), (4 * page, 4), (3 * page - 1, 2), (page, 1), (0, 0)] {
            assert_eq!(pool.trim(to).unwrap(), held * page, "{source:?}: to {to}");
            assert_eq!(machine.check(&pool).reserved_bytes, held * page);
        }
        machine.finish(pool);
    }
}

/// At the maximum as much is moved as has to be, and no more; nothing is given back and made anew.
#[test]
fn a_request_at_the_maximum_moves_only_what_it_needs() {
    for source in MAPPED {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let pool = machine.builder().maximum(6 * page).build().unwrap();
        // Idle pages 1, 3 and 5 between used ones.
        let mut blocks: Vec<_> = (0..6).map(|_| Some(pool.allocate_buffer(page).unwrap())).collect();
        [1, 3, 5].into_iter().for_each(|index| blocks[index] = None);
        let (creates, unmaps) = (machine.sim.calls(Call::MemCreate), machine.sim.calls(Call::MemUnmap));
        let wide = pool.allocate_buffer(2 * page).unwrap();
        assert_eq!(machine.sim.calls(Call::MemUnmap) - unmaps, 1, "{source:?}: page 5 is part of the window");
        assert_eq!((machine.sim.calls(Call::MemCreate), machine.sim.calls(Call::MemRelease)), (creates, 0), "{source:?}");
        assert_eq!(machine.check(&pool).free_bytes, page);
        drop((wide, blocks));
        machine.finish(pool);
    }
}

/// An aligned block that ends on free pages behind a hole needs fewer new ones than one at the hole's begin.
#[test]
fn an_aligned_block_is_mapped_where_it_needs_the_fewest_pages() {
    for source in MAPPED {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let pool = machine.pool();
        let [first, middle, last] = [1, 7, 2].map(|pages| pool.allocate_buffer(pages * page).unwrap());
        drop(middle);
        assert_eq!(pool.trim(0).unwrap(), 3 * page);
        drop(last);
        let block = pool.allocate_buffer_aligned(4 * page, 2 * page).unwrap();
        assert_eq!(block.address(), first.address().offset(6 * page), "{source:?}");
        assert_eq!(machine.check(&pool).reserved_bytes, 5 * page, "{source:?}");
        drop((first, block));
        machine.finish(pool);
    }
}

/// Peaks are those of the counts beside them.
#[test]
fn peaks_stay_where_the_counts_were() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        let mut draw = Draw(11);
        let (mut live, mut requested, mut reserved, mut buffers) = (0, 0, 0, Vec::new());
        for _ in 0..300 {
            if draw.below(3) > 0 || buffers.is_empty() {
                buffers.push(pool.allocate_buffer(draw.size(23)).unwrap());
            } else {
                drop(buffers.swap_remove(draw.below(buffers.len() as u64) as usize));
            }
            let statistics = pool.statistics();
            live = live.max(statistics.live_bytes);
            requested = requested.max(statistics.requested_bytes);
            reserved = reserved.max(statistics.reserved_bytes);
            assert_eq!((statistics.peak_live_bytes, statistics.peak_requested_bytes), (live, requested), "{source:?}");
            assert!(statistics.peak_reserved_bytes >= reserved);
        }
        drop(buffers);
        machine.finish(pool);
    }
}

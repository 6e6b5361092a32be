//! Blocks that become longer where they are.

use crate::amid::{GIVING, TAKING, amid};
use crate::support::{DEVICE, Draw, MAPPED, Machine, Owners, SOURCES, assert_only_failures, free};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use vrampool::driver::sim::FaultTarget;
use vrampool::driver::{Call, Driver, StreamHandle};
use vrampool::error::{CuResult, InvalidFree};
use vrampool::units::{GIB, KIB, MIB};
use vrampool::{DeviceBuffer, DevicePtr, Pool};

const GRAIN: u64 = 16 * KIB;

/// Makes a block longer, which must work, where it is.
#[track_caller]
fn grow(machine: &Machine, buffer: &mut DeviceBuffer, size: u64) {
    let address = buffer.address();
    assert!(buffer.try_grow(size).unwrap(), "{:?}: {size} at {address}", machine.source);
    assert_eq!((buffer.address(), buffer.size()), (address, size));
    assert!(machine.is_usable(address, size));
}

/// What is free behind a block serves it, without the driver: up to the next block, and not a byte of that.
#[test]
fn a_block_grows_into_free_memory() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        let whole = pool.allocate_buffer(24 * MIB).unwrap();
        drop(whole);
        let mut block = pool.allocate_buffer(MIB + 1).unwrap();
        let gap = pool.allocate_buffer(7 * MIB).unwrap();
        let mut next = pool.allocate_buffer(MIB).unwrap();
        assert_eq!(gap.address(), block.address().offset(MIB + GRAIN));
        assert!(!block.try_grow(MIB + GRAIN + 1).unwrap(), "someone is there");
        drop(gap);
        let (calls, before) = (machine.memory_calls(), machine.check(&pool));
        grow(&machine, &mut block, 3 * MIB);
        grow(&machine, &mut block, 8 * MIB + GRAIN);
        let after = machine.check(&pool);
        assert_eq!((after.live_blocks, after.allocations), (before.live_blocks, before.allocations));
        assert_eq!(after.live_bytes, 9 * MIB + GRAIN);
        assert_eq!((after.requested_bytes, after.peak_requested_bytes), (9 * MIB + GRAIN, after.peak_requested_bytes.max(9 * MIB + GRAIN)));
        assert_eq!(after.free_bytes, before.free_bytes - 7 * MIB);
        assert!(!block.try_grow(8 * MIB + GRAIN + 1).unwrap(), "the next block is there");
        assert_eq!(machine.check(&pool), after);
        grow(&machine, &mut next, 2 * MIB);
        assert_eq!(machine.memory_calls(), calls);
        // All of it comes back.
        drop(block);
        drop(next);
        assert_eq!(machine.check(&pool).free_bytes, after.free_bytes + after.live_bytes);
        machine.finish(pool);
    }
}

/// Unmapped pages behind a block are mapped, with what is free before them; a plain allocation ends where it ends.
#[test]
fn a_block_grows_into_unmapped_pages() {
    for source in SOURCES {
        let page = source.page_bytes();
        let machine = Machine::with(source, 2 * GIB, |config| config.backed(true));
        let pool = machine.pool();
        let mut block = pool.allocate_buffer(page + page / 2).unwrap();
        machine.sim.memset_d8_async(DEVICE, block.address(), 77, block.size(), StreamHandle::LEGACY).unwrap();
        if source.maps_pages() {
            // Free, both, and unmapped alone.
            for (size, pages) in [(2 * page - 5, 2), (4 * page + 1, 5), (5 * page, 5), (9 * page, 9)] {
                grow(&machine, &mut block, size);
                let statistics = machine.check(&pool);
                assert_eq!((statistics.reserved_bytes, statistics.requested_bytes), (pages * page, size));
            }
        } else {
            grow(&machine, &mut block, 2 * page);
            let before = machine.check(&pool);
            assert!(!block.try_grow(2 * page + 1).unwrap());
            assert_eq!(machine.check(&pool), before);
        }
        // What was there is there.
        let mut bytes = vec![0; (page + page / 2) as usize];
        machine.sim.memcpy_device_to_host(DEVICE, &mut bytes, block.address()).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 77));
        drop(block);
        machine.finish(pool);
    }
}

/// A vector that takes a page more at a time, in a pool of its own, stays where it is.
#[test]
fn a_thousand_pages_one_by_one_never_move() {
    for source in [MAPPED[0], MAPPED[1]] {
        let machine = Machine::large(source);
        let page = source.page_bytes();
        let pool = machine.pool();
        let mut vector = pool.allocate_buffer(page).unwrap();
        for pages in 2..=1001 {
            grow(&machine, &mut vector, pages * page);
        }
        assert_eq!(machine.check(&pool).reserved_bytes, 1001 * page);
        drop(vector);
        machine.finish(pool);
    }
}

/// What a block was rounded up by is its own, in slots and in grains; a slot does not become larger.
#[test]
fn rounding_is_used_up_first() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        for (size, slot) in [(1, 256), (257, 512), (5000, 5 * KIB), (40 * KIB + 1, 48 * KIB), (64 * KIB - 1, 64 * KIB)] {
            let mut block = pool.allocate_buffer(size).unwrap();
            let beside = pool.allocate_buffer(size).unwrap();
            let before = machine.check(&pool);
            grow(&machine, &mut block, slot);
            let after = machine.check(&pool);
            assert_eq!((after.live_bytes, after.requested_bytes), (before.live_bytes, before.requested_bytes + slot - size));
            let of_class = |statistics: &vrampool::Statistics| statistics.classes.iter().map(|class| class.requested_bytes).sum::<u64>();
            assert_eq!(of_class(&after), of_class(&before) + slot - size);
            // It has that already, and is not made smaller.
            assert!(block.try_grow(slot).unwrap() && block.try_grow(1).unwrap() && block.try_grow(0).unwrap());
            assert_eq!((block.size(), &machine.check(&pool)), (slot, &after));
            for more in [slot + 1, MIB, 100 * GIB] {
                assert!(!block.try_grow(more).unwrap());
            }
            assert_eq!(machine.check(&pool), after);
            drop((block, beside));
        }
        let mut block = pool.allocate_buffer(64 * KIB + 1).unwrap();
        let calls = machine.memory_calls();
        grow(&machine, &mut block, 80 * KIB);
        assert_eq!((machine.memory_calls(), machine.check(&pool).live_bytes), (calls, 80 * KIB));
        drop(block);
        machine.finish(pool);
    }
}

/// Blocks on one handle stay on it; the zero block has no place; reservations and slabs are in the way like blocks.
#[test]
fn what_cannot_grow_says_so_and_stays() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        drop(pool.allocate_buffer(16 * MIB).unwrap());
        let mut alone = pool.allocate_buffer_contiguous(MIB + 1, 1).unwrap();
        assert!(alone.try_grow(MIB + GRAIN).unwrap());
        assert!(!alone.try_grow(MIB + GRAIN + 1).unwrap());
        let mut block = pool.allocate_buffer(MIB).unwrap();
        let reservation = pool.reserve(MIB).unwrap();
        assert!(!block.try_grow(MIB + 1).unwrap(), "the reservation is there");
        let drawn = reservation.allocate(MIB / 2).unwrap();
        free(&pool, drawn).unwrap();
        assert!(block.try_grow(MIB + MIB / 2).unwrap());
        assert!(!block.try_grow(MIB + MIB / 2 + 1).unwrap(), "the rest of the reservation is there");
        drop(reservation);
        let slot = pool.allocate(300).unwrap();
        assert!(slot >= block.address().offset(MIB + MIB / 2));
        assert!(!block.try_grow(GIB).unwrap(), "the slab is there");
        let before = machine.check(&pool);
        assert!(pool.try_grow(DevicePtr::NULL, 0).unwrap() && !pool.try_grow(DevicePtr::NULL, 1).unwrap());
        let mut nothing = pool.allocate_buffer(0).unwrap();
        assert!(nothing.try_grow(0).unwrap() && !nothing.try_grow(1).unwrap());
        assert_eq!(machine.check(&pool), before);
        free(&pool, slot).unwrap();
        drop((alone, block, nothing));
        machine.finish(pool);
    }
}

/// A region of addresses ends somewhere, and the next is elsewhere.
#[test]
fn the_end_of_the_addresses_is_an_end() {
    let machine = Machine::with(MAPPED[1], GIB, |config| config.address_space(64 * MIB));
    let pool = machine.pool();
    let mut block = pool.allocate_buffer(2 * MIB).unwrap();
    let mut most = 2 * MIB;
    while most < GIB && block.try_grow(most).unwrap() {
        most += 2 * MIB;
    }
    assert!((4 * MIB..=66 * MIB).contains(&most), "{most}");
    let before = machine.check(&pool);
    assert!(!block.try_grow(most).unwrap());
    assert_eq!(machine.check(&pool), before);
    drop(block);
    machine.finish(pool);
}

/// What is no live block, or no size, is an error that changes nothing.
#[test]
fn errors() {
    for source in SOURCES {
        let machine = Machine::new(source, GIB);
        let pool = machine.pool();
        let block = pool.allocate(MIB).unwrap();
        let slot = pool.allocate(300).unwrap();
        let dead = pool.allocate(2 * MIB).unwrap();
        free(&pool, dead).unwrap();
        let before = machine.check(&pool);
        for (address, reason) in [
            (block.offset(1), InvalidFree::Interior),
            (block.offset(GRAIN), InvalidFree::Interior),
            (slot.offset(256), InvalidFree::Interior),
            (slot.offset(512), InvalidFree::NotLive),
            (dead, InvalidFree::NotLive),
            (DevicePtr::new(4096), InvalidFree::Foreign),
        ] {
            let error = pool.try_grow(address, 3 * MIB).unwrap_err();
            assert!(error.is_invalid_argument() && error.invalid_free_reason() == Some(reason), "{address}: {error}");
        }
        assert_eq!(machine.check(&pool), before);
        assert!(pool.try_grow(block, u64::MAX).unwrap_err().is_invalid_argument());
        assert!(pool.try_grow(slot, 1 << 50).unwrap_err().is_invalid_argument());
        assert_only_failures(&before, &machine.check(&pool), 2);
        // A buffer knows its own allocation.
        let mut buffer = pool.allocate_buffer(MIB).unwrap();
        free(&pool, buffer.address()).unwrap();
        assert_eq!(buffer.try_grow(2 * MIB).unwrap_err().invalid_free_reason(), Some(InvalidFree::NotLive));
        let again = pool.allocate(MIB).unwrap();
        assert_eq!(again, buffer.address());
        assert_eq!(buffer.try_grow(2 * MIB).unwrap_err().invalid_free_reason(), Some(InvalidFree::Stale));
        assert_eq!(buffer.size(), MIB);
        free(&pool, again).unwrap();
        free(&pool, slot).unwrap();
        free(&pool, block).unwrap();
        drop(buffer);
        machine.finish(pool);
    }
}

/// A block of `pages` pages at the end of what the pool has mapped, and as many idle pages below it as asked for.
fn at_the_limit(machine: &Machine, maximum: u64, idle: u64, pages: u64) -> (Pool, DeviceBuffer) {
    let page = machine.source.page_bytes();
    let pool = machine.builder().maximum(maximum * page).build().unwrap();
    let below: Vec<_> = (0..idle).map(|_| pool.allocate_buffer(page).unwrap()).collect();
    let block = pool.allocate_buffer(pages * page).unwrap();
    drop(below);
    (pool, block)
}

/// At the limit, idle handles are moved under the block, or go for it.
#[test]
fn idle_memory_goes_where_the_block_needs_it() {
    for source in MAPPED {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let (pool, mut block) = at_the_limit(&machine, 10, 6, 4);
        let made = machine.sim.calls(Call::MemCreate);
        grow(&machine, &mut block, 7 * page);
        grow(&machine, &mut block, 10 * page);
        assert_eq!(machine.sim.calls(Call::MemCreate), made, "what lay idle was moved");
        let before = machine.check(&pool);
        assert_eq!((before.reserved_bytes, before.free_bytes), (10 * page, 0));
        let error = block.try_grow(10 * page + 1).unwrap_err();
        let numbers = *error.numbers().unwrap();
        assert_eq!((numbers.requested, numbers.rounded), (10 * page + 1, 10 * page + GRAIN), "{error}");
        assert_eq!((numbers.growing_from, numbers.capacity), (Some(10 * page), Some(10 * page)));
        assert!(error.to_string().contains("to grow in place"), "{error}");
        assert_only_failures(&before, &machine.check(&pool), 1);
        // More than the device has.
        assert!(block.try_grow(100 * GIB).unwrap_err().is_out_of_memory());
        assert_eq!(block.size(), 10 * page);
        drop(block);
        // One large idle handle fits nowhere behind the block, and small ones are made in its place.
        pool.trim(0).unwrap();
        let large = pool.allocate_buffer_contiguous(6 * page, 1).unwrap();
        let mut block = pool.allocate_buffer(3 * page).unwrap();
        drop(large);
        grow(&machine, &mut block, 8 * page);
        machine.check(&pool);
        drop(block);
        machine.finish(pool);
    }
}

/// The driver has less than the limit allows, and says so; the callback may free something.
#[test]
fn a_lack_of_memory_is_told_and_may_be_helped() {
    for source in MAPPED {
        let page = source.page_bytes();
        let machine = Machine::new(source, 10 * page);
        let kept: Arc<Mutex<Option<DeviceBuffer>>> = Arc::default();
        let hand = Arc::clone(&kept);
        let pool = machine.builder().on_out_of_memory(move |_| hand.lock().unwrap().take().is_some()).build().unwrap();
        *kept.lock().unwrap() = Some(pool.allocate_buffer(3 * page).unwrap());
        let mut block = pool.allocate_buffer(5 * page).unwrap();
        grow(&machine, &mut block, 9 * page);
        assert!(kept.lock().unwrap().is_none());
        grow(&machine, &mut block, 10 * page);
        let before = machine.check(&pool);
        let error = block.try_grow(10 * page + 1).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert_only_failures(&before, &machine.check(&pool), 1);
        drop(block);
        machine.finish(pool);
    }
}

/// A fault at any call leaves the block and everything else as it was, and the next attempt works.
#[test]
fn faults_are_unwound() {
    for source in MAPPED {
        let page = source.page_bytes();
        // New pages alone, and idle ones that are moved.
        for (maximum, idle) in [(60, 0), (10, 6)] {
            let (begin, end) = {
                let machine = Machine::large(source);
                let (pool, mut block) = at_the_limit(&machine, maximum, idle, 4);
                let begin = machine.memory_calls();
                grow(&machine, &mut block, 10 * page);
                drop((block, pool));
                (begin, machine.memory_calls())
            };
            for (k, code) in
                (begin..end).flat_map(|k| [None, Some(CuResult::ERROR_UNKNOWN), Some(CuResult::ERROR_OUT_OF_MEMORY)].map(|code| (k, code)))
            {
                let machine = Machine::large(source);
                let (pool, mut block) = at_the_limit(&machine, maximum, idle, 4);
                let before = machine.check(&pool);
                assert_eq!(machine.memory_calls(), begin);
                match code {
                    Some(code) => machine.sim.fail(FaultTarget::MemoryCalls, k - begin, code),
                    None => machine.sim.panic_at(FaultTarget::MemoryCalls, k - begin),
                }
                let outcome = catch_unwind(AssertUnwindSafe(|| block.try_grow(10 * page)));
                machine.sim.clear_faults();
                let after = machine.check(&pool);
                match outcome {
                    Ok(Ok(grown)) => assert!(grown && block.size() == 10 * page),
                    Ok(Err(error)) => assert!(code.is_some() && (error.is_driver() || error.is_out_of_memory()), "{error}"),
                    Err(_) => assert!(code.is_none()),
                }
                if block.size() == 4 * page {
                    assert_eq!((after.live_bytes, after.requested_bytes), (before.live_bytes, before.requested_bytes));
                    assert!(machine.is_usable(block.address(), 4 * page));
                    grow(&machine, &mut block, 10 * page);
                }
                drop(block);
                machine.finish(pool);
            }
        }
    }
}

/// The place or the block itself goes while the driver is at work.
#[test]
fn what_others_do_meanwhile_is_seen() {
    let page = MAPPED[1].page_bytes();
    // The block is freed by its address: its new pages are nobody's, and the growth is an error.
    for nth in 0..3 {
        let machine = Machine::large(MAPPED[1]);
        let pool = machine.pool();
        let block = pool.allocate(page).unwrap();
        let plan = Mutex::new(Some(nth));
        let hand = pool.clone();
        machine.sim.set_hook(move |call| {
            let mut plan = plan.lock().unwrap();
            if call.manages_memory() && plan.is_some() {
                *plan = plan.and_then(|left: u32| left.checked_sub(1));
                if plan.is_none() {
                    drop(plan);
                    free(&hand, block).unwrap();
                }
            }
        });
        let error = pool.try_grow(block, 4 * page).unwrap_err();
        assert_eq!(error.invalid_free_reason(), Some(InvalidFree::NotLive), "{nth}");
        machine.sim.clear_hook();
        let statistics = machine.check(&pool);
        assert_eq!((statistics.live_bytes, statistics.free_bytes), (0, 4 * page));
        machine.finish(pool);
    }
}

/// Threads whose blocks are neighbours grow, free and allocate, and no byte is ever two's.
#[test]
fn neighbours_grow_side_by_side() {
    for source in [SOURCES[0], SOURCES[1], SOURCES[3], SOURCES[5]] {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let pool = machine.builder().maximum(64 * page).build().unwrap();
        let owners = Owners::default();
        let start = Barrier::new(5);
        let grown: u64 = thread::scope(|scope| {
            let work = |thread: u64| {
                let mut draw = Draw(thread);
                let (mut live, mut grown): (Vec<DeviceBuffer>, u64) = (Vec::new(), 0);
                start.wait();
                for _ in 0..600 {
                    match draw.below(6) {
                        0..=1 => {
                            if let Ok(buffer) = pool.allocate_buffer(draw.between(60 * KIB, 3 * page)) {
                                owners.take(buffer.address(), buffer.size());
                                live.push(buffer);
                            }
                        }
                        2 if thread == 4 => _ = pool.trim(0).unwrap(),
                        2 | 3 if !live.is_empty() => {
                            let buffer = live.swap_remove(draw.below(live.len() as u64) as usize);
                            owners.give(buffer.address());
                            buffer.free().unwrap();
                        }
                        _ if !live.is_empty() => {
                            let which = draw.below(live.len() as u64) as usize;
                            let buffer = &mut live[which];
                            let (size, more) = (buffer.size(), draw.between(1, 2 * page));
                            match buffer.try_grow(size + more) {
                                Ok(true) => {
                                    owners.take(buffer.address().offset(size), more);
                                    owners.give(buffer.address().offset(size));
                                    owners.give(buffer.address());
                                    owners.take(buffer.address(), buffer.size());
                                    grown += 1;
                                }
                                Ok(false) => assert_eq!(buffer.size(), size),
                                Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                            }
                        }
                        _ => {}
                    }
                    let statistics = pool.statistics();
                    assert_eq!(statistics.accounted_bytes(), statistics.reserved_bytes);
                    pool.check().unwrap();
                }
                live.drain(..).for_each(|buffer| {
                    owners.give(buffer.address());
                    buffer.free().unwrap();
                });
                grown
            };
            let threads: Vec<_> = (0..5).map(|thread| scope.spawn(move || work(thread))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(grown > 20, "{source:?}: {grown}");
        assert!(machine.sim.peak_bytes(DEVICE) <= 64 * page);
        assert_eq!(pool.statistics().live_bytes, 0);
        machine.finish(pool);
    }
}

/// A window under way is in nobody's reach: what is allocated meanwhile comes to lie behind it.
#[test]
fn nobody_comes_between_a_block_and_its_new_pages() {
    for source in MAPPED {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let pool = machine.pool();
        let block = pool.allocate(page).unwrap();
        let (grown, other) = amid(&machine, TAKING, || pool.try_grow(block, 4 * page), || pool.allocate(page));
        assert!(grown.unwrap());
        let other = other.unwrap();
        assert_eq!(other, block.offset(4 * page));
        assert!(!pool.try_grow(block, 5 * page).unwrap());
        [block, other].into_iter().for_each(|address| free(&pool, address).unwrap());
        machine.finish(pool);
    }
}

/// What is under way behind a block may leave room there: a growth that says no before that is known was told a lie.
#[test]
fn what_is_under_way_behind_a_block_is_waited_for() {
    for source in MAPPED {
        let page = source.page_bytes();
        // Pages that are being given back can be mapped again.
        let machine = Machine::large(source);
        let pool = machine.pool();
        let [block, idle] = [page, 4 * page].map(|size| pool.allocate(size).unwrap());
        free(&pool, idle).unwrap();
        let (held, grown) = amid(&machine, GIVING, || pool.trim(0), || pool.try_grow(block, 3 * page));
        assert!(held.unwrap() >= page && grown.unwrap(), "{source:?}");
        assert!(machine.is_usable(block, 3 * page));
        free(&pool, block).unwrap();
        machine.finish(pool);
        // Pages that are being made for another are left alone, or free where that fails.
        for fails in [false, true] {
            let machine = Machine::large(source);
            let pool = machine.pool();
            let block = pool.allocate(page).unwrap();
            if fails {
                machine.sim.fail(Call::MemCreate, 0, CuResult::ERROR_UNKNOWN);
            }
            let (other, grown) = amid(&machine, TAKING, || pool.allocate(2 * page), || pool.try_grow(block, 3 * page));
            assert_eq!((other.is_err(), grown.unwrap()), (fails, fails), "{source:?}");
            machine.sim.clear_faults();
            free(&pool, block).unwrap();
            if let Ok(other) = other {
                free(&pool, other).unwrap();
            }
            machine.finish(pool);
        }
    }
}

/// Handles that are moved under a block leave the bytes of it alone, and both are read as one.
#[test]
fn bytes_stay_where_they_are_as_handles_move() {
    for source in MAPPED {
        let page = source.page_bytes();
        let machine = Machine::with(source, 20 * page, |config| config.backed(true));
        let (pool, mut block) = at_the_limit(&machine, 8, 5, 3);
        machine.sim.memset_d8_async(DEVICE, block.address(), 3, 3 * page, StreamHandle::LEGACY).unwrap();
        grow(&machine, &mut block, 8 * page);
        machine.sim.memset_d8_async(DEVICE, block.address().offset(3 * page), 9, 5 * page, StreamHandle::LEGACY).unwrap();
        let mut bytes = vec![0; (8 * page) as usize];
        machine.sim.memcpy_device_to_host(DEVICE, &mut bytes, block.address()).unwrap();
        let (old, new) = bytes.split_at((3 * page) as usize);
        assert!(old.iter().all(|&byte| byte == 3) && new.iter().all(|&byte| byte == 9));
        drop(block);
        machine.finish(pool);
    }
}

//! The maximum at every instant, and nobody told that memory has run out while it is on its way.

use crate::amid::{GIVING, Other, TAKING, amid};
use crate::support::{DEVICE, Draw, MAPPED, Machine, SOURCES, free};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use vrampool::driver::{Call, Driver, Meter};
use vrampool::error::CuResult;
use vrampool::units::KIB;
use vrampool::{Device, DeviceBuffer, Pool};

/// Memory that is charged to a growth which then fails is free: who was refused meanwhile was told a lie.
#[test]
fn who_needs_what_a_failing_growth_has_waits_for_it() {
    for source in SOURCES.into_iter().filter(|source| !source.pads()) {
        let page = source.page_bytes();
        for code in [CuResult::ERROR_UNKNOWN, CuResult::ERROR_ILLEGAL_ADDRESS] {
            let machine = Machine::large(source);
            let pool = machine.builder().maximum(4 * page).build().unwrap();
            // The very call in whose middle the second thread comes.
            TAKING.iter().for_each(|&call| machine.sim.fail(call, 0, code));
            let (first, second) = amid(&machine, TAKING, || pool.allocate(4 * page), || pool.allocate(3 * page));
            assert_eq!(first.unwrap_err().code(), Some(code));
            let address = second.unwrap_or_else(|error| panic!("{source:?}: {error}"));
            assert!(machine.is_usable(address, 3 * page));
            machine.sim.clear_faults();
            free(&pool, address).unwrap();
            machine.finish(pool);
        }
    }
}

/// Who makes room knows what it gives back itself; what another gives back meanwhile is room as well.
#[test]
fn what_a_trim_gives_back_while_a_request_makes_room_is_counted() {
    for source in MAPPED {
        let page = source.page_bytes();
        let machine = Machine::new(source, 2 * page);
        let pool = machine.pool();
        // Two idle pages with a hole between them, and the device is full.
        let blocks = [pool.allocate_buffer(1).unwrap(), pool.allocate_buffer_aligned(1, 2 * page).unwrap()];
        drop(blocks);
        assert_eq!((pool.statistics().free_bytes, pool.statistics().largest_free_bytes), (2 * page, page));
        let (block, trimmed) = amid(&machine, GIVING, || pool.allocate_buffer(2 * page), || pool.trim(0));
        trimmed.unwrap();
        drop(block.unwrap_or_else(|error| panic!("{source:?}: {error}")));
        machine.finish(pool);
    }
}

/// A slot is freed while a slab is mapped for who found none: taking that slot leaves a slab that nothing empties.
#[test]
fn a_slab_that_is_not_needed_any_more_is_free_memory() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        let mut buffers = vec![pool.allocate_buffer(64 * KIB).unwrap()];
        while pool.statistics().free_bytes + pool.statistics().slab_idle_bytes > 0 {
            buffers.push(pool.allocate_buffer(64 * KIB).unwrap());
        }
        let first = buffers.swap_remove(0);
        let (block, ()) = amid(&machine, TAKING, || pool.allocate_buffer(64 * KIB).unwrap(), || drop(first));
        let statistics = machine.check(&pool);
        assert_eq!((statistics.slab_idle_bytes, statistics.free_bytes), (0, source.page_bytes()), "{source:?}");
        drop((block, buffers));
        assert_eq!(pool.trim(0).unwrap(), 0);
        machine.finish(pool);
    }
}

/// What a growth brings beyond its own need is for whoever waits.
#[test]
fn who_needs_what_a_growth_will_bring_waits_for_it() {
    for source in SOURCES.into_iter().filter(|source| !source.pads()) {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let pool = machine.builder().growth(4 * page).maximum(4 * page).build().unwrap();
        let (first, second) = amid(&machine, TAKING, || pool.allocate(page), || pool.allocate(3 * page));
        let blocks = [(first.unwrap(), page), (second.unwrap_or_else(|error| panic!("{source:?}: {error}")), 3 * page)];
        assert!(blocks.iter().all(|&(address, size)| machine.is_usable(address, size)));
        blocks.into_iter().for_each(|(address, _)| free(&pool, address).unwrap());
        machine.finish(pool);
    }
}

/// Memory on its way back to the driver is soon there to be had.
#[test]
fn who_needs_what_a_trim_gives_back_waits_for_it() {
    for source in SOURCES.into_iter().filter(|source| !source.pads()) {
        let page = source.page_bytes();
        for fails in [false, true] {
            let machine = Machine::large(source);
            let pool = machine.builder().initial(4 * page).maximum(4 * page).build().unwrap();
            if fails {
                // Then it is there all the same: it never went.
                GIVING.iter().for_each(|&call| machine.sim.fail(call, 0, CuResult::ERROR_UNKNOWN));
            }
            let (first, second) = amid(&machine, GIVING, || pool.trim(0), || pool.allocate(4 * page));
            assert_eq!(first.is_err(), fails, "{source:?}: {first:?}");
            let address = second.unwrap_or_else(|error| panic!("{source:?}: {error}"));
            assert!(machine.is_usable(address, 4 * page));
            machine.sim.clear_faults();
            free(&pool, address).unwrap();
            machine.finish(pool);
        }
    }
}

/// Who waits must be told in the end.
#[test]
fn who_waits_in_vain_is_refused_with_numbers_that_are_true_then() {
    for source in SOURCES.into_iter().filter(|source| !source.pads()) {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let pool = machine.builder().maximum(4 * page).build().unwrap();
        let (first, second) = amid(&machine, TAKING, || pool.allocate(3 * page), || pool.allocate(2 * page));
        let error = second.unwrap_err();
        let numbers = error.numbers().unwrap_or_else(|| panic!("{source:?}: {error}"));
        assert_eq!((numbers.requested, numbers.live, numbers.reserved), (2 * page, 3 * page, 3 * page), "{source:?}");
        free(&pool, first.unwrap()).unwrap();
        machine.finish(pool);
    }
}

/// The driver refuses one growth because of what another holds for a moment; by the time that the refusal is thought
/// about, the moment has passed.
#[test]
fn a_refusal_that_another_growth_caused_is_no_reason_to_give_up() {
    for source in MAPPED {
        let page = source.page_bytes();
        for pages in [1, 2, 3, 4, 7] {
            let machine = Machine::new(source, 8 * page);
            let pool = machine.pool();
            // The first thread holds the whole device in handles, then fails to map them.
            machine.sim.fail(Call::MemMap, 0, CuResult::ERROR_UNKNOWN);
            let (begun, first_maps) = mpsc::channel();
            let (refused, second_asks) = mpsc::channel();
            let (ended, first_ended) = mpsc::channel();
            let once = Mutex::new((Some((begun, second_asks)), Some((refused, first_ended))));
            machine.sim.set_hook(move |call| match call {
                Call::MemMap => {
                    let first = once.lock().unwrap().0.take();
                    if let Some((begun, second_asks)) = first {
                        begun.send(()).unwrap();
                        second_asks.recv().unwrap();
                    }
                }
                // The second thread was refused and asks how much is left.
                Call::MemoryInfo => {
                    let second = once.lock().unwrap().1.take();
                    if let Some((refused, first_ended)) = second {
                        refused.send(()).unwrap();
                        first_ended.recv().unwrap();
                    }
                }
                _ => {}
            });
            thread::scope(|scope| {
                let first = scope.spawn(|| {
                    let result = pool.allocate(8 * page);
                    ended.send(()).unwrap();
                    result
                });
                first_maps.recv().unwrap();
                let second = scope.spawn(|| pool.allocate_buffer(pages * page));
                assert!(first.join().unwrap().unwrap_err().is_driver());
                let buffer = second.join().unwrap().unwrap_or_else(|error| panic!("{source:?}: {pages} of 8 pages: {error}"));
                assert!(machine.is_usable(buffer.address(), pages * page));
            });
            machine.sim.clear_hook();
            machine.finish(pool);
        }
    }
}

/// Two requests that each see the other fail, and take that for a reason to try again, never end.
#[test]
fn requests_that_cannot_be_served_end_however_many_there_are() {
    for source in MAPPED {
        let page = source.page_bytes();
        for wishes in [&[8, 8][..], &[8, 6], &[8, 8, 6], &[7, 8, 9, 3, 3], &[7; 8]] {
            let left = 6;
            let machine = Machine::with(source, 64 * page, |config| config.other_process((64 - left) * page));
            let pool = machine.pool();
            // All are in the middle of growing at once. Who grows then waits until the others sleep, and who was refused until
            // one of them is awake again: the turns in which one could wake the other for ever. Neither waits without end.
            let together = Barrier::new(wishes.len());
            let others: Arc<Vec<Other>> = Arc::new(wishes.iter().map(|_| Other::default()).collect());
            let threads = Arc::clone(&others);
            let calls = AtomicU64::new(0);
            machine.sim.set_hook(move |call| {
                let rest = || threads.iter().filter(|other| !other.is_this());
                match call {
                    Call::MemCreate => {
                        if threads.iter().any(|other| other.is_this() && !other.seen.swap(true, Ordering::Relaxed)) {
                            together.wait();
                        }
                        let _ = (0..500).find(|_| {
                            thread::yield_now();
                            rest().all(Other::is_done_or_waits)
                        });
                        // Far more than any of this takes.
                        assert!(calls.fetch_add(1, Ordering::Relaxed) < 1000, "requests keep each other trying for ever");
                    }
                    Call::MemoryInfo => {
                        let _ = (0..500).find(|_| {
                            thread::yield_now();
                            rest().any(|other| !other.is_done_or_waits())
                        });
                    }
                    _ => {}
                }
            });
            let handle = &pool;
            thread::scope(|scope| {
                let threads: Vec<_> = wishes
                    .iter()
                    .zip(others.iter())
                    .map(|(&pages, other)| (pages, scope.spawn(move || other.work(|| handle.allocate_buffer(pages * page)))))
                    .collect();
                // A block lives until all are served or refused, so only so many can be served.
                let results: Vec<_> = threads.into_iter().map(|(pages, thread)| (pages, thread.join().unwrap())).collect();
                let served: u64 = results.iter().filter(|(_, result)| result.is_ok()).map(|(pages, _)| pages).sum();
                assert!(served <= left, "{source:?} {wishes:?}");
                for (pages, result) in &results {
                    let fits = pages + served <= left;
                    assert!(result.is_ok() || !fits, "{source:?} {wishes:?}: {pages} pages fit beside {served}: {result:?}");
                    assert!(result.as_ref().err().is_none_or(vrampool::Error::is_out_of_memory), "{result:?}");
                }
            });
            machine.sim.clear_hook();
            machine.finish(pool);
        }
    }
}

/// A limit that is looked at before, or after, but not while memory is taken, is passed for a moment.
#[test]
fn the_maximum_holds_at_every_instant_while_eight_threads_press_on_it() {
    for source in SOURCES {
        let page = source.page_bytes();
        let maximum = 10 * page;
        let machine = Machine::large(source);
        let meter = Arc::new(Meter::new(Arc::clone(&machine.sim) as Arc<dyn Driver>));
        let device = Device::new(Arc::clone(&meter) as Arc<dyn Driver>, DEVICE).unwrap();
        let pool = machine.builder().device(device).growth(3 * page).maximum(maximum + page / 2).build().unwrap();
        let refused = AtomicU64::new(0);
        thread::scope(|scope| {
            for thread in 0..8 {
                let (pool, refused) = (&pool, &refused);
                scope.spawn(move || {
                    let mut draw = Draw(thread);
                    let mut live: Vec<DeviceBuffer> = Vec::new();
                    for _ in 0..400 {
                        match draw.below(12) {
                            0 => assert!(pool.trim(draw.below(10) * page).unwrap() <= maximum),
                            1..=7 => match pool.allocate_buffer(draw.between(1, 3 * page)) {
                                Ok(buffer) => live.push(buffer),
                                Err(error) => {
                                    assert!(error.is_out_of_memory(), "{source:?}: {error}");
                                    refused.fetch_add(1, Ordering::Relaxed);
                                    live.pop();
                                }
                            },
                            _ if live.is_empty() => {}
                            _ => drop(live.swap_remove(draw.below(live.len() as u64) as usize)),
                        }
                    }
                });
            }
        });
        assert!(refused.load(Ordering::Relaxed) > 0, "{source:?}: nobody came to the limit");
        // Three counts that know nothing of each other.
        assert!(machine.sim.peak_bytes(DEVICE) <= maximum, "{source:?}: {}", machine.sim.peak_bytes(DEVICE));
        assert!(meter.peak_reserved_bytes() <= maximum, "{source:?}: {}", meter.peak_reserved_bytes());
        assert!(machine.check(&pool).peak_reserved_bytes <= maximum, "{source:?}");
        machine.finish(pool);
    }
}

/// Every thread holds at most one block of two pages, which touches three. While each could have three pages to itself,
/// nobody may be refused, whatever the others are in the middle of.
#[track_caller]
fn press(machine: &Machine, pool: &Pool, threads: u64, turns: u64) {
    let page = pool.page_bytes();
    thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut draw = Draw(thread);
                for turn in 0..turns {
                    let size = if draw.below(4) == 0 { draw.between(1, 64 << 10) } else { draw.between(1, 2 * page) };
                    let buffer = pool
                        .allocate_buffer(size)
                        .unwrap_or_else(|error| panic!("{:?}: thread {thread}, turn {turn}: {error}", machine.source));
                    if draw.below(5) == 0 {
                        pool.trim(draw.below(8) * page).unwrap();
                    }
                    buffer.free().unwrap();
                }
            });
        }
    });
}

#[test]
fn nobody_is_refused_at_the_maximum_while_others_are_at_work() {
    for source in SOURCES.into_iter().filter(|source| !source.pads()) {
        for threads in [2, 8] {
            let machine = Machine::large(source);
            let pool = machine.builder().maximum(threads * 3 * source.page_bytes()).build().unwrap();
            press(&machine, &pool, threads, 1000);
            assert_eq!(machine.check(&pool).failed_allocations, 0);
            machine.finish(pool);
        }
    }
}

#[test]
fn nobody_is_refused_on_a_full_device_while_others_are_at_work() {
    for source in SOURCES.into_iter().filter(|source| !source.pads()) {
        for threads in [2, 8] {
            let machine = Machine::new(source, threads * 3 * source.page_bytes());
            let pool = machine.pool();
            press(&machine, &pool, threads, 1000);
            assert_eq!(machine.check(&pool).failed_allocations, 0);
            machine.finish(pool);
        }
    }
}

/// Threads that start together need one reservation, not one each: half a TiB for every thread is soon all there is.
#[test]
fn who_needs_addresses_that_another_is_reserving_waits_for_them() {
    for source in MAPPED {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let pool = machine.pool();
        let (first, second) = amid(&machine, &[Call::MemAddressReserve], || pool.allocate_buffer(page), || pool.allocate_buffer(page));
        assert_eq!(machine.sim.calls(Call::MemAddressReserve), 1, "{source:?}");
        drop([first.unwrap(), second.unwrap()]);
        // Where the reservation fails, who waited makes its own.
        let machine = Machine::large(source);
        let pool = machine.pool();
        machine.sim.fail(Call::MemAddressReserve, 0, CuResult::ERROR_UNKNOWN);
        let (first, second) = amid(&machine, &[Call::MemAddressReserve], || pool.allocate_buffer(page), || pool.allocate_buffer(page));
        assert!(first.unwrap_err().is_driver());
        drop(second.unwrap());
        machine.finish(pool);
    }
}

/// The last addresses are reserved by one thread while another, refused, turns to what needs addresses too.
#[test]
fn nobody_is_refused_for_addresses_that_another_has_just_reserved() {
    for source in MAPPED {
        let page = source.page_bytes();
        for round in 0..300 {
            // The first reservation, of four times the need, takes all there are.
            let machine = Machine::with(source, 64 * page, |config| config.address_space(4 * page));
            let pool = machine.pool();
            let together = Barrier::new(4);
            let buffers: Vec<DeviceBuffer> = thread::scope(|scope| {
                let work = || {
                    together.wait();
                    pool.allocate_buffer(page)
                };
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap().unwrap_or_else(|error| panic!("round {round}: {error}"))).collect()
            });
            assert_eq!(machine.check(&pool).live_bytes, 4 * page);
            drop(buffers);
            machine.finish(pool);
        }
    }
}

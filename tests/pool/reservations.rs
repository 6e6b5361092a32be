//! Memory set aside: what is drawn from it does not fail, and nothing else gets it.

use crate::support::{DEVICE, Draw, Machine, Owners, SOURCES, assert_only_failures, free};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use vrampool::driver::sim::FaultTarget;
use vrampool::driver::{Call, Driver, StreamHandle};
use vrampool::error::{CuResult, InvalidFree};
use vrampool::units::{GIB, KIB, MIB};
use vrampool::{DevicePtr, Pool, Reservation};

const GRAIN: u64 = 16 * KIB;

/// Draws blocks of mixed sizes until nothing is left.
fn draw_all(reservation: &Reservation, owners: &Owners, mut sizes: Draw) -> Vec<DevicePtr> {
    let mut blocks = Vec::new();
    while reservation.remaining() > 0 {
        let size = sizes.size(28).min(reservation.remaining());
        let address = reservation.allocate(size).unwrap_or_else(|error| panic!("{size} bytes: {error}"));
        owners.take(address, size);
        blocks.push(address);
    }
    blocks
}

/// A promise of memory that was only counted is broken by whoever allocates meanwhile, or by memory in pieces.
#[test]
fn what_is_set_aside_outlives_eight_threads_that_take_all_the_rest() {
    for (source, no_vmm) in [(SOURCES[1], false), (SOURCES[1], true), (SOURCES[3], false)] {
        let machine = Machine::new(source, 5 * GIB);
        let pool = machine.builder().no_vmm(no_vmm).build().unwrap();
        let reservation = pool.reserve(4 * GIB).unwrap();
        assert_eq!((reservation.remaining(), pool.statistics().committed_bytes), (4 * GIB, 4 * GIB));
        let owners = Owners::default();
        let (start, full) = (Barrier::new(8), Barrier::new(9));
        thread::scope(|scope| {
            let hoard = |thread: u64| {
                let mut draw = Draw(thread);
                let mut blocks = Vec::new();
                start.wait();
                for top in [100 * MIB, MIB, 80 * KIB] {
                    while let Ok(buffer) = pool.allocate_buffer(draw.between(top / 2, top)) {
                        owners.take(buffer.address(), buffer.size());
                        blocks.push(buffer);
                    }
                }
                // All of it stays taken until everything was drawn.
                full.wait();
                full.wait();
                drop(blocks);
            };
            for thread in 0..8 {
                scope.spawn(move || hoard(thread));
            }
            full.wait();
            let statistics = pool.statistics();
            assert!(statistics.failed_allocations >= 24 && statistics.free_bytes < MIB, "{statistics:?}");
            let calls = machine.sim.calls(FaultTarget::AnyCall);
            let blocks = draw_all(&reservation, &owners, Draw(99));
            assert_eq!(machine.sim.calls(FaultTarget::AnyCall), calls, "drawing called the driver");
            pool.check().unwrap();
            assert_eq!(pool.statistics().committed_bytes, 0);
            full.wait();
            blocks.into_iter().for_each(|address| free(&pool, address).unwrap());
        });
        drop(reservation);
        assert_eq!(pool.statistics().live_bytes, 0);
        machine.finish(pool);
    }
}

/// Threads share one reservation, each byte of which one of them gets, while others allocate and free.
#[test]
fn threads_draw_from_one_reservation() {
    let machine = Machine::new(SOURCES[1], GIB);
    let pool = machine.pool();
    let reservation = pool.reserve(512 * MIB).unwrap();
    let (owners, drawn) = (Owners::default(), AtomicU64::new(0));
    thread::scope(|scope| {
        for thread in 0..6 {
            let (pool, reservation, owners, drawn) = (&pool, &reservation, &owners, &drawn);
            scope.spawn(move || {
                let mut draw = Draw(thread);
                for _ in 0..2000 {
                    let size = draw.between(1, 200 * KIB);
                    if thread < 3 {
                        // The three cannot use up more than there is.
                        if drawn.fetch_add(size.next_multiple_of(GRAIN), Ordering::Relaxed) < 500 * MIB {
                            let address = reservation.allocate(size).unwrap();
                            owners.take(address, size);
                        }
                    } else {
                        let address = pool.allocate(size).unwrap();
                        owners.take(address, size);
                        owners.give(address);
                        free(pool, address).unwrap();
                    }
                }
            });
        }
    });
    assert!(pool.statistics().live_blocks > 1000);
    pool.check().unwrap();
    drop(reservation);
    machine.finish(pool);
}

/// Blocks lie one behind the other, each a whole number of grains; what an alignment skips goes to the pool.
#[test]
fn blocks_are_cut_from_the_front() {
    for source in SOURCES {
        let machine = Machine::with(source, GIB, |config| config.backed(true));
        let pool = machine.pool();
        let reservation = pool.reserve(40 * MIB - 5).unwrap();
        assert_eq!(reservation.remaining(), 40 * MIB);
        let before = machine.check(&pool);
        assert_eq!((before.live_blocks, before.allocations, before.requested_bytes, before.live_bytes), (0, 0, 0, 0));
        let first = reservation.allocate_buffer(1).unwrap();
        let second = reservation.allocate_buffer(GRAIN + 1).unwrap();
        let third = reservation.allocate(MIB).unwrap();
        assert_eq!((second.address(), third), (first.address().offset(GRAIN), first.address().offset(3 * GRAIN)));
        assert_eq!((second.size(), reservation.remaining()), (GRAIN + 1, 39 * MIB - 3 * GRAIN));
        let statistics = machine.check(&pool);
        assert_eq!((statistics.live_blocks, statistics.requested_bytes, statistics.live_bytes), (3, MIB + GRAIN + 2, MIB + 3 * GRAIN));
        assert_eq!((statistics.allocations, statistics.free_bytes), (3, before.free_bytes));
        // The device reads and writes what was drawn, to its last byte.
        machine.sim.memset_d8_async(DEVICE, third, 7, MIB, StreamHandle::LEGACY).unwrap();
        let mut bytes = vec![0; MIB as usize];
        machine.sim.memcpy_device_to_host(DEVICE, &mut bytes, third).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 7));
        let aligned = reservation.allocate_buffer_aligned(5, 8 * MIB).unwrap();
        assert!(aligned.address().is_aligned_to(8 * MIB));
        let skipped = aligned.address().address() - third.address() - MIB;
        assert_eq!(reservation.remaining(), 39 * MIB - 4 * GRAIN - skipped);
        assert_eq!(machine.check(&pool).free_bytes, before.free_bytes + skipped);
        // What is freed goes to the pool.
        drop(second);
        free(&pool, third).unwrap();
        let statistics = machine.check(&pool);
        assert_eq!(statistics.free_bytes, before.free_bytes + skipped + MIB + 2 * GRAIN);
        assert_eq!(statistics.committed_bytes, reservation.remaining());
        // So does the rest, and blocks outlive the reservation.
        drop(reservation);
        let statistics = machine.check(&pool);
        assert_eq!((statistics.committed_bytes, statistics.live_blocks, statistics.live_bytes), (0, 2, 2 * GRAIN));
        drop((first, aligned));
        assert_eq!(pool.trim(0).unwrap(), 0);
        machine.finish(pool);
    }
}

/// A draw of more than is left takes nothing elsewhere, though there is plenty, and says what is left.
#[test]
fn more_than_is_left_is_refused_with_its_numbers() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.builder().on_out_of_memory(|_| panic!("the pool does not lack memory")).build().unwrap();
        let reservation = pool.reserve(3 * MIB).unwrap();
        let block = reservation.allocate(MIB).unwrap();
        let (before, calls) = (machine.check(&pool), machine.memory_calls());
        for (size, alignment) in [(2 * MIB + 1, 1), (GIB, 1), (1, 32 * MIB), (64 * GIB, 1 << 20)] {
            let served = reservation.allocate_aligned(size, alignment);
            if let (Ok(address), 1) = (&served, size) {
                // It may lie so by chance.
                panic!("{address} is a multiple of {alignment} in {source:?}: choose another");
            }
            let error = served.unwrap_err();
            let numbers = error.numbers().unwrap();
            assert_eq!((numbers.requested, numbers.left_of_reservation, numbers.committed), (size, Some(2 * MIB), 2 * MIB), "{error}");
            assert!(error.to_string().contains("of a reservation with 2 MiB left"), "{error}");
        }
        assert!(reservation.allocate(u64::MAX).unwrap_err().is_invalid_argument());
        assert!(reservation.allocate_aligned(1, 3).unwrap_err().is_invalid_argument());
        assert!(reservation.allocate_aligned(0, 3).unwrap_err().is_invalid_argument());
        assert_eq!(reservation.allocate(0).unwrap(), DevicePtr::NULL);
        assert_eq!(machine.memory_calls(), calls);
        assert_only_failures(&before, &machine.check(&pool), 6);
        assert_eq!(reservation.remaining(), 2 * MIB);
        reservation.allocate_buffer(2 * MIB).unwrap().free().unwrap();
        assert_eq!(reservation.remaining(), 0);
        free(&pool, block).unwrap();
        drop(reservation);
        machine.finish(pool);
    }
}

/// A reservation is no block: none of its addresses can be freed, and no mistake with them costs it anything.
#[test]
fn its_addresses_cannot_be_freed() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        // The lowest free run is where the block was.
        let start = pool.allocate(4 * MIB).unwrap();
        free(&pool, start).unwrap();
        let reservation = pool.reserve(4 * MIB).unwrap();
        let refused = |offset: u64| free(&pool, start.offset(offset)).unwrap_err().invalid_free_reason();
        for offset in [0, 1, 256, GRAIN, GRAIN + 1, 2 * MIB, 4 * MIB - 1] {
            assert_eq!(refused(offset), Some(InvalidFree::NotLive), "{source:?}, {offset}");
        }
        assert_eq!(reservation.allocate(GRAIN + 1).unwrap(), start);
        assert_eq!([GRAIN, 2 * GRAIN].map(refused), [Some(InvalidFree::Interior), Some(InvalidFree::NotLive)]);
        free(&pool, start).unwrap();
        assert_eq!(refused(0), Some(InvalidFree::NotLive));
        assert_eq!((reservation.remaining(), pool.statistics().refused_frees), (4 * MIB - 2 * GRAIN, 10));
        machine.check(&pool);
        drop(reservation);
        machine.finish(pool);
    }
}

/// What cannot be set aside is an error that leaves everything as it was; zero bytes can.
#[test]
fn edges() {
    for source in SOURCES {
        let page = source.page_bytes();
        let machine = Machine::new(source, 64 * page);
        let pool = machine.pool();
        let nothing = pool.reserve(0).unwrap();
        assert_eq!((nothing.remaining(), machine.held()), (0, 0));
        assert_eq!(nothing.allocate_buffer(0).unwrap().address(), DevicePtr::NULL);
        let error = nothing.allocate(1).unwrap_err();
        assert_eq!(error.numbers().unwrap().left_of_reservation, Some(0));
        let mut before = machine.check(&pool);
        assert!(pool.reserve(u64::MAX).unwrap_err().is_invalid_argument());
        let error = pool.reserve(65 * page).unwrap_err();
        assert!(error.is_out_of_memory() && error.numbers().unwrap().left_of_reservation.is_none());
        // It was charged before it was tried.
        before.peak_reserved_bytes = pool.statistics().peak_reserved_bytes;
        assert_only_failures(&before, &machine.check(&pool), 2);
        // Others are told what stands in their way.
        let most = pool.reserve(60 * page).unwrap();
        let error = pool.allocate(10 * page).unwrap_err();
        assert_eq!(error.numbers().unwrap().committed, 60 * page);
        assert!(error.to_string().contains("set aside by reservations"), "{error}");
        // It is not idle memory: a trim leaves it alone.
        assert!(pool.trim(0).unwrap() >= 60 * page);
        drop(nothing);
        let block = most.allocate_buffer(60 * page).unwrap();
        assert!(machine.is_usable(block.address(), 60 * page));
        drop((most, block));
        assert_eq!(pool.trim(0).unwrap(), 0);
        machine.finish(pool);
    }
}

/// The reservation and what is drawn from it keep the memory alive, in whatever order they and the pool's handles go.
#[test]
fn the_pool_lives_as_long_as_the_reservation() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        let reservation = pool.reserve(10 * MIB).unwrap();
        drop(pool);
        let block = reservation.allocate_buffer(MIB).unwrap();
        let pool: Pool = reservation.pool().clone();
        drop(reservation);
        assert_eq!(machine.check(&pool).committed_bytes, 0);
        drop(pool);
        assert!(machine.is_usable(block.address(), MIB));
        drop(block);
        machine.sim.audit().unwrap();
    }
}

/// At the limit idle handles go, or move, for a reservation as for any block; and the callback may free something for it.
#[test]
fn room_is_made_for_it() {
    for source in SOURCES {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let kept: Arc<std::sync::Mutex<Vec<_>>> = Arc::default();
        let hand = Arc::clone(&kept);
        let builder = machine.builder().maximum(20 * page).on_out_of_memory(move |_| hand.lock().unwrap().pop().is_some());
        let pool = builder.build().unwrap();
        let blocks: Vec<_> = (0..8).map(|_| pool.allocate_buffer(2 * page - page / 2).unwrap()).collect();
        let (odd, even): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(index, _)| index % 2 == 1);
        drop(odd);
        kept.lock().unwrap().extend(even);
        let reservation = pool.reserve(16 * page).unwrap();
        assert!(kept.lock().unwrap().len() < 4, "nothing had to be freed");
        machine.check(&pool);
        kept.lock().unwrap().clear();
        drop(reservation);
        machine.finish(pool);
    }
}

/// A fault at any call leaves nothing set aside, and nothing lost.
#[test]
fn faults_are_unwound() {
    for source in SOURCES {
        let page = source.page_bytes();
        let calls = {
            let machine = Machine::large(source);
            let pool = machine.pool();
            let reservation = pool.reserve(9 * page).unwrap();
            let calls = machine.memory_calls();
            drop(reservation);
            machine.finish(pool);
            calls
        };
        for k in 0..calls {
            let machine = Machine::large(source);
            let pool = machine.pool();
            machine.sim.fail(FaultTarget::MemoryCalls, k, CuResult::ERROR_UNKNOWN);
            let error = pool.reserve(9 * page).unwrap_err();
            assert!(error.is_driver(), "{error}");
            let statistics = machine.check(&pool);
            assert_eq!((statistics.committed_bytes, statistics.failed_allocations), (0, 1));
            drop(pool.reserve(9 * page).unwrap());
            machine.finish(pool);
        }
        // The driver's end is silent, also where something is left.
        let machine = Machine::large(source);
        let pool = machine.pool();
        let reservation = pool.reserve(9 * page).unwrap();
        for call in [Call::MemUnmap, Call::MemRelease, Call::MemFree] {
            machine.sim.fail(call, 0, CuResult::ERROR_UNKNOWN);
        }
        drop(pool);
        drop(reservation);
        machine.sim.clear_faults();
    }
}

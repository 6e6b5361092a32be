//! Many threads, and callbacks that use the pool.

use crate::support::{DEVICE, Draw, MAPPED, Machine, Owners, SOURCES, free};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;
use vrampool::driver::{Driver, StreamHandle};
use vrampool::units::{GIB, KIB, MIB};
use vrampool::{DevicePtr, Pool};

/// One list shared by four threads without enough care crashes, or gives one block to two of them. Every block is filled
/// with its owner's byte from end to end, and read back before it is freed.
#[test]
fn four_threads_never_own_the_same_byte() {
    for source in [SOURCES[1], SOURCES[3], SOURCES[6]] {
        let machine = Machine::with(source, GIB, |config| config.backed(true));
        let pool = machine.pool();
        let owners = Owners::default();
        thread::scope(|scope| {
            for thread in 0..4 {
                let (machine, pool, owners) = (&machine, &pool, &owners);
                scope.spawn(move || {
                    let driver = &machine.sim;
                    let mut draw = Draw(thread);
                    let mut bytes = vec![0; 10_000];
                    let mut live: Vec<(DevicePtr, u64, u8)> = Vec::new();
                    let mut free_checked = |(address, size, value): (DevicePtr, u64, u8)| {
                        let bytes = &mut bytes[..size as usize];
                        driver.memcpy_device_to_host(DEVICE, bytes, address).unwrap();
                        assert!(bytes.iter().all(|&byte| byte == value), "{size} bytes at {address} are not their owner's any more");
                        owners.give(address);
                        free(pool, address).unwrap();
                    };
                    for _ in 0..100_000 {
                        if live.len() < 100 && draw.below(2) == 0 || live.is_empty() {
                            let size = draw.between(100, 10_000);
                            let address = pool.allocate(size).unwrap();
                            owners.take(address, size);
                            // Two bits say whose it is, the others when.
                            let value = (draw.next() << 2 | thread) as u8;
                            driver.memset_d8_async(DEVICE, address, value, size, StreamHandle::LEGACY).unwrap();
                            live.push((address, size, value));
                        } else {
                            free_checked(live.swap_remove(draw.below(live.len() as u64) as usize));
                        }
                    }
                    live.into_iter().for_each(&mut free_checked);
                });
            }
        });
        let statistics = machine.check(&pool);
        assert_eq!((statistics.live_blocks, statistics.live_bytes, statistics.slab_idle_bytes), (0, 0, 0));
        assert_eq!(statistics.allocations, statistics.deallocations);
        assert!(statistics.allocations > 150_000 && statistics.refused_frees == 0);
        machine.finish(pool);
    }
}

/// Blocks of every size change hands: a thread that never allocated frees what another, long gone, left.
#[test]
fn any_thread_frees_any_block() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        let (give, take) = mpsc::sync_channel(16);
        thread::scope(|scope| {
            let pool = &pool;
            scope.spawn(move || {
                for turn in 0..2000 {
                    let size = [1, 64 * KIB, 64 * KIB + 1, 2 * MIB, 2 * MIB + 1][turn % 5];
                    let buffer = pool.allocate_buffer(size).unwrap();
                    give.send(if turn % 2 == 0 { Ok(buffer) } else { Err(buffer.into_raw()) }).unwrap();
                }
            });
            scope.spawn(move || {
                for block in take {
                    match block {
                        Ok(buffer) => buffer.free().unwrap(),
                        Err(address) => free(pool, address).unwrap(),
                    }
                }
            });
        });
        let statistics = machine.check(&pool);
        assert_eq!((statistics.live_bytes, statistics.deallocations), (0, 2000));
        // What is held follows what is in flight, not what has passed through.
        assert!(statistics.reserved_bytes <= 20 * 2 * 2 * source.page_bytes(), "{source:?}: {}", statistics.reserved_bytes);
        machine.finish(pool);
    }
}

/// A callback under the pool's lock deadlocks as soon as it asks the pool anything.
#[test]
fn an_out_of_memory_callback_may_use_the_pool() {
    for source in SOURCES.into_iter().filter(|source| !source.pads()) {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let own: Arc<OnceLock<Pool>> = Arc::default();
        let ballast: Arc<Mutex<Vec<DevicePtr>>> = Arc::default();
        let calls = Arc::new(AtomicU64::new(0));
        let (seen, blocks, counter) = (Arc::clone(&own), Arc::clone(&ballast), Arc::clone(&calls));
        let pool = machine
            .builder()
            .maximum(8 * page)
            .on_out_of_memory(move |numbers| {
                let pool = seen.get().unwrap();
                counter.fetch_add(1, Ordering::Relaxed);
                assert_eq!(numbers.reserved, pool.statistics().reserved_bytes);
                // It may allocate, also beyond what there is: then it is called within itself, once.
                let small = pool.allocate_buffer(1).unwrap();
                drop(small);
                pool.trim(0).unwrap();
                pool.check().unwrap();
                let Some(block) = blocks.lock().unwrap().pop() else { return false };
                free(pool, block).unwrap();
                true
            })
            .build()
            .unwrap();
        own.set(pool.clone()).unwrap();
        // Three blocks of two pages and a bit that is left for the callback.
        ballast.lock().unwrap().extend((0..3).map(|_| pool.allocate(2 * page).unwrap()));
        let needed = pool.allocate(5 * page).unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 2, "{source:?}: asked until it had freed enough");
        assert!(machine.is_usable(needed, 5 * page));
        let error = pool.allocate(5 * page).unwrap_err();
        assert!(error.is_out_of_memory());
        assert_eq!(calls.load(Ordering::Relaxed), 4, "{source:?}: once for the last block, once to hear that there is none");
        free(&pool, needed).unwrap();
        machine.check(&pool);
    }
}

/// A callback that needs a lock of the program, held by a thread that allocates: with the pool's lock held they wait for
/// each other.
#[test]
fn an_out_of_memory_callback_may_wait_for_a_thread_that_uses_the_pool() {
    let machine = Machine::new(MAPPED[1], 64 * MIB);
    let programs = Arc::new(Mutex::new(()));
    let (called, wait) = mpsc::channel();
    let callback_lock = Arc::clone(&programs);
    let pool = machine
        .builder()
        .maximum(8 * MIB)
        .on_out_of_memory(move |_| {
            called.send(()).unwrap();
            drop(callback_lock.lock().unwrap());
            false
        })
        .build()
        .unwrap();
    let block = pool.allocate(4 * MIB).unwrap();
    let held = programs.lock().unwrap();
    thread::scope(|scope| {
        let request = scope.spawn(|| pool.allocate(6 * MIB));
        wait.recv().unwrap();
        // The callback is under way and waits for this thread.
        let other = pool.allocate(MIB).unwrap();
        let grown = pool.allocate(3 * MIB).unwrap();
        assert_eq!(pool.statistics().live_blocks, 3);
        [other, grown].into_iter().for_each(|block| free(&pool, block).unwrap());
        assert!(pool.trim(0).unwrap() < 8 * MIB);
        drop(held);
        assert!(request.join().unwrap().unwrap_err().is_out_of_memory());
    });
    free(&pool, block).unwrap();
    machine.finish(pool);
}

/// A callback that panics is the caller's panic and nobody else's.
#[test]
fn a_callback_that_panics_leaves_the_pool_to_others() {
    let machine = Machine::new(MAPPED[1], 64 * MIB);
    let panics = Arc::new(AtomicBool::new(true));
    let first = Arc::clone(&panics);
    let pool = machine
        .builder()
        .maximum(8 * MIB)
        .on_out_of_memory(move |_| if first.swap(false, Ordering::Relaxed) { panic!("the callback's own") } else { false })
        .build()
        .unwrap();
    let block = pool.allocate(4 * MIB).unwrap();
    let result = thread::scope(|scope| scope.spawn(|| pool.allocate(6 * MIB)).join());
    assert!(result.is_err());
    assert!(pool.allocate(6 * MIB).unwrap_err().is_out_of_memory());
    let other = pool.allocate(4 * MIB).unwrap();
    [block, other].into_iter().for_each(|block| free(&pool, block).unwrap());
    machine.finish(pool);
}

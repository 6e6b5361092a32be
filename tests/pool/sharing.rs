//! Several pools under one limit, and several on one device without any.

use crate::amid::{GIVING, TAKING, amid};
use crate::support::{DEVICE, Draw, MAPPED, Machine, SOURCES, Source, free};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use vrampool::driver::sim::FaultTarget;
use vrampool::driver::{Call, MemoryKind};
use vrampool::error::CuResult;
use vrampool::units::MIB;
use vrampool::{DeviceBuffer, MemoryLimit, Pool};

/// Pools whose addresses cost no padding, so that pages can be counted.
fn sources() -> impl Iterator<Item = Source> {
    SOURCES.into_iter().filter(|source| !source.pads())
}

/// Two pools on one device, under a limit of so many pages.
fn pair(machine: &Machine, pages: u64) -> (MemoryLimit, [Pool; 2]) {
    let limit = MemoryLimit::new(pages * machine.source.page_bytes());
    let pools = [(); 2].map(|()| machine.builder().limit(&limit).build().unwrap());
    (limit, pools)
}

/// The limit's books, the pools' and the device's agree, and nothing outlives the pools.
#[track_caller]
fn finish<const N: usize>(machine: &Machine, limit: &MemoryLimit, pools: [Pool; N]) {
    let held: u64 = pools.iter().map(|pool| pool.check().map(|()| pool.statistics().reserved_bytes).unwrap()).sum();
    assert_eq!((limit.held(), machine.held()), (held, held), "{:?}", machine.source);
    drop(pools);
    assert_eq!(limit.held(), 0, "{:?}: the last pool has given its share back", machine.source);
    machine.sim.audit().unwrap();
}

#[test]
fn what_is_idle_in_one_pool_is_there_for_the_other() {
    for source in sources() {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let (limit, pools) = pair(&machine, 8);
        let [a, b] = &pools;
        let kept = b.allocate_buffer(page).unwrap();
        drop((0..7).map(|_| b.allocate_buffer(page).unwrap()).collect::<Vec<_>>());
        assert_eq!((limit.held(), limit.maximum()), (8 * page, 8 * page));
        let block = a.allocate_buffer(3 * page).unwrap();
        assert!(machine.is_usable(block.address(), 3 * page));
        assert_eq!(b.statistics().reserved_bytes, 5 * page, "{source:?}: no more than was needed");
        // What is live in the other pool is not touched; the numbers say whose limit it was.
        let error = a.allocate_buffer(5 * page).unwrap_err();
        let numbers = error.numbers().unwrap();
        assert_eq!((numbers.limit, numbers.limit_held, numbers.code), (Some(8 * page), Some(limit.held()), None));
        assert!(error.to_string().ends_with("the common limit is reached"), "{error}");
        drop(a.allocate_buffer(4 * page).unwrap());
        drop((kept, block));
        finish(&machine, &limit, pools);
    }
}

#[test]
fn a_pool_that_goes_and_growth_that_fails_are_charged_nothing() {
    for source in sources() {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let (limit, [a, b]) = pair(&machine, 4);
        let block = a.allocate(3 * page).unwrap();
        assert!(b.allocate(2 * page).unwrap_err().is_out_of_memory());
        assert_eq!(limit.held(), 3 * page);
        // Freed or not, what the pool held goes with it.
        assert!(!block.is_null());
        drop(a);
        assert_eq!(limit.held(), 0, "{source:?}");
        for at in 0..4 {
            machine.sim.fail(FaultTarget::MemoryCalls, at, CuResult::ERROR_UNKNOWN);
            let result = b.allocate_buffer(4 * page);
            assert_eq!(limit.held(), if result.is_ok() { 4 * page } else { 0 }, "{source:?}: call {at}");
            drop(result);
            machine.sim.clear_faults();
            b.trim(0).unwrap();
            machine.sim.panic_at(FaultTarget::MemoryCalls, at);
            let result = thread::scope(|scope| scope.spawn(|| b.allocate_buffer(4 * page)).join());
            assert_eq!(limit.held(), if result.is_ok() { 4 * page } else { 0 }, "{source:?}: a panic at call {at}");
            drop(result);
            machine.sim.clear_faults();
            b.trim(0).unwrap();
        }
        // A pool of its own maximum, and of an initial size.
        let c = machine.builder().limit(&limit).initial(3 * page).build().unwrap();
        assert_eq!(limit.held(), 3 * page);
        let refused = machine.builder().limit(&limit).initial(5 * page).build().unwrap_err();
        assert!(refused.is_out_of_memory(), "{refused}");
        finish(&machine, &limit, [b, c]);
    }
}

/// The driver's panic in the pool that is asked is the asker's to hear of, and leaves both sound.
#[test]
fn a_driver_that_fails_while_another_pool_gives_back_keeps_the_books() {
    for source in sources() {
        let page = source.page_bytes();
        for panics in [false, true] {
            let machine = Machine::large(source);
            let (limit, pools) = pair(&machine, 4);
            drop(pools[1].allocate_buffer(4 * page).unwrap());
            for &call in GIVING {
                if panics { machine.sim.panic_at(call, 0) } else { machine.sim.fail(call, 0, CuResult::ERROR_UNKNOWN) }
            }
            let asker = &pools[0];
            let result = thread::scope(|scope| scope.spawn(|| asker.allocate_buffer(4 * page)).join());
            assert_eq!(result.is_err(), panics);
            machine.sim.clear_faults();
            assert!(machine.held() <= 4 * page && limit.held() == machine.held());
            drop(result);
            drop(asker.allocate_buffer(4 * page).unwrap_or_else(|error| panic!("{source:?}: {error}")));
            finish(&machine, &limit, pools);
        }
    }
}

/// What another pool has for a moment, or is giving back, is waited for; what it keeps is not.
#[test]
fn nobody_is_refused_for_what_another_pool_is_in_the_middle_of() {
    for source in sources() {
        let page = source.page_bytes();
        // It gives back.
        let machine = Machine::large(source);
        let (limit, pools) = pair(&machine, 4);
        let [a, b] = &pools;
        drop(b.allocate_buffer(4 * page).unwrap());
        let (trimmed, block) = amid(&machine, GIVING, || b.trim(0), || a.allocate_buffer(4 * page));
        assert_eq!(trimmed.unwrap(), 0);
        drop(block.unwrap_or_else(|error| panic!("{source:?}: {error}")));
        a.trim(0).unwrap();
        // It has charged what it will not keep.
        TAKING.iter().for_each(|&call| machine.sim.fail(call, 0, CuResult::ERROR_UNKNOWN));
        let (failed, block) = amid(&machine, TAKING, || b.allocate_buffer(4 * page), || a.allocate_buffer(4 * page));
        assert!(failed.unwrap_err().is_driver());
        drop(block.unwrap_or_else(|error| panic!("{source:?}: {error}")));
        machine.sim.clear_faults();
        a.trim(0).unwrap();
        // It keeps what it has charged: who waited is refused in the end, with numbers that are true then.
        let (kept, refused) = amid(&machine, TAKING, || b.allocate_buffer(3 * page), || a.allocate_buffer(2 * page));
        let error = refused.unwrap_err();
        let numbers = error.numbers().unwrap_or_else(|| panic!("{source:?}: {error}"));
        assert_eq!((numbers.limit_held, numbers.reserved), (Some(3 * page), 0), "{source:?}");
        drop(kept);
        // It goes.
        let [a, b] = pools;
        let (_, block) = amid(&machine, GIVING, move || drop(b), || a.allocate_buffer(4 * page));
        drop(block.unwrap_or_else(|error| panic!("{source:?}: {error}")));
        finish(&machine, &limit, [a]);
    }
}

/// Two pools that could serve each other only by what neither has must not wait for each other.
#[test]
fn pools_that_have_nothing_for_each_other_refuse() {
    for source in sources() {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let (limit, pools) = pair(&machine, 4);
        let live: Vec<DeviceBuffer> = pools.iter().map(|pool| pool.allocate_buffer(2 * page).unwrap()).collect();
        let calls = machine.memory_calls();
        for _ in 0..100 {
            let together = Barrier::new(2);
            thread::scope(|scope| {
                for pool in &pools {
                    let together = &together;
                    scope.spawn(move || {
                        together.wait();
                        assert!(pool.allocate_buffer(page).unwrap_err().is_out_of_memory());
                    });
                }
            });
        }
        assert_eq!(machine.memory_calls(), calls, "{source:?}: there is nothing to ask the driver for");
        drop(live);
        finish(&machine, &limit, pools);
    }
}

/// Each thread holds at most one block of two pages, which touches three. While each could have three pages to itself,
/// nobody may be refused, whichever pools the memory is in; and at no moment is more held than the limit.
#[test]
fn nobody_is_refused_under_a_common_limit_while_others_are_at_work() {
    for source in sources() {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let (limit, pools) = pair(&machine, 4 * 3);
        let (books, most) = (limit.clone(), Arc::new(AtomicU64::new(0)));
        let seen = Arc::clone(&most);
        machine.sim.set_hook(move |_| {
            seen.fetch_max(books.held(), Ordering::Relaxed);
        });
        thread::scope(|scope| {
            for thread in 0..4 {
                let pool = &pools[thread % 2];
                scope.spawn(move || {
                    let mut draw = Draw(thread as u64);
                    for turn in 0..600 {
                        let size = if draw.below(4) == 0 { draw.between(1, 64 << 10) } else { draw.between(1, 2 * page) };
                        let buffer =
                            pool.allocate_buffer(size).unwrap_or_else(|error| panic!("{source:?}: thread {thread}, turn {turn}: {error}"));
                        if draw.below(5) == 0 {
                            pool.trim(draw.below(8) * page).unwrap();
                        }
                        buffer.free().unwrap();
                    }
                });
            }
        });
        machine.sim.clear_hook();
        assert!(most.load(Ordering::Relaxed) <= limit.maximum(), "{source:?}");
        if source.maps_pages() {
            // By the device's own count, at every moment.
            assert!(machine.sim.peak_bytes(DEVICE) <= limit.maximum(), "{source:?}");
        }
        finish(&machine, &limit, pools);
    }
}

/// More is asked for than there is, so that pools take from each other all the time.
#[test]
fn a_common_limit_holds_at_every_instant_while_pools_take_from_each_other() {
    for source in sources() {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let (limit, pools) = pair(&machine, 10);
        let refused = AtomicU64::new(0);
        thread::scope(|scope| {
            for thread in 0..4 {
                let (pool, limit, refused) = (&pools[thread % 2], &limit, &refused);
                scope.spawn(move || {
                    let mut draw = Draw(thread as u64);
                    let mut live: Vec<DeviceBuffer> = Vec::new();
                    for _ in 0..400 {
                        assert!(limit.held() <= limit.maximum());
                        match draw.below(12) {
                            0..=7 => match pool.allocate_buffer(draw.between(1, 3 * page)) {
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
        if source.maps_pages() {
            assert!(machine.sim.peak_bytes(DEVICE) <= limit.maximum(), "{source:?}");
        }
        finish(&machine, &limit, pools);
    }
}

#[test]
fn a_lowered_common_limit_is_kept_to_as_any_pool_frees() {
    for source in sources() {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let (limit, pools) = pair(&machine, 8);
        let mut live: Vec<Vec<DeviceBuffer>> =
            pools.iter().map(|pool| (0..4).map(|_| pool.allocate_buffer(page).unwrap()).collect()).collect();
        drop(live[1].pop());
        assert_eq!(limit.set_maximum(4 * page).unwrap(), 7 * page, "{source:?}: what is idle goes");
        assert!(pools[0].allocate(page).unwrap_err().is_out_of_memory());
        for (turn, left) in [6, 5, 4, 4].into_iter().enumerate() {
            drop(live[turn % 2].pop());
            assert_eq!(limit.held(), left * page, "{source:?}");
        }
        assert_eq!(limit.set_maximum(8 * page).unwrap(), 4 * page);
        let block = pools[0].allocate_buffer(5 * page).unwrap();
        drop((live, block));
        finish(&machine, &limit, pools);
    }
}

/// A limit is for memory of any kind; and a maximum of one's own holds beside it.
#[test]
fn pools_of_every_kind_share_a_limit() {
    let machine = Machine::large(MAPPED[1]);
    let limit = MemoryLimit::new(16 * MIB);
    let kinds = [MemoryKind::Device, MemoryKind::Pinned, MemoryKind::Managed];
    let pools = kinds.map(|kind| machine.builder().kind(kind).maximum(8 * MIB).limit(&limit).build().unwrap());
    let [a, b, c] = &pools;
    let blocks = [a.allocate_buffer(6 * MIB).unwrap(), b.allocate_buffer(8 * MIB).unwrap()];
    assert_eq!(limit.held(), 14 * MIB);
    assert!(c.allocate(4 * MIB).unwrap_err().to_string().ends_with("the common limit is reached"));
    assert!(b.allocate(2 * MIB).unwrap_err().to_string().ends_with("the pool's limit is reached"));
    drop(blocks);
    drop(c.allocate_buffer(8 * MIB).unwrap());
    assert_eq!(limit.held(), 16 * MIB);
    assert_eq!(pools.iter().map(|pool| pool.statistics().reserved_bytes).sum::<u64>(), 16 * MIB);
    drop(pools);
    assert_eq!(limit.held(), 0);
    machine.sim.audit().unwrap();
}

/// A limit is a wish until the driver agrees. Where it does not, it is the driver's word that counts, and what is idle
/// elsewhere stays there.
#[test]
fn where_the_driver_refuses_other_pools_are_left_alone() {
    for shared in [false, true] {
        let machine = Machine::with(MAPPED[1], 64 * MIB, |config| config.other_process(48 * MIB));
        let limit = MemoryLimit::new(64 * MIB);
        let build = || if shared { machine.builder().limit(&limit) } else { machine.builder() }.build().unwrap();
        let [a, b] = [build(), build()];
        drop(b.allocate_buffer(12 * MIB).unwrap());
        let error = a.allocate(8 * MIB).unwrap_err();
        let numbers = error.numbers().unwrap_or_else(|| panic!("{error}"));
        assert_eq!((numbers.code, numbers.driver_free), (Some(CuResult::ERROR_OUT_OF_MEMORY), Some(4 * MIB)));
        assert_eq!((b.statistics().reserved_bytes, numbers.limit), (12 * MIB, shared.then_some(64 * MIB)));
        // The other pool's own trim makes room.
        b.trim(0).unwrap();
        let block = a.allocate(8 * MIB).unwrap();
        free(&a, block).unwrap();
        assert_eq!(machine.sim.calls(Call::MemAlloc), 0);
        drop((a, b));
        machine.sim.audit().unwrap();
    }
}

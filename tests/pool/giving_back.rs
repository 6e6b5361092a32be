//! Memory that goes back: by a trim, by a maximum that is lowered, and with time.

use crate::support::{DEVICE, MAPPED, Machine, SOURCES, free};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, OnceLock};
use std::thread;
use std::time::Duration;
use vrampool::driver::Call;
use vrampool::error::CuResult;
use vrampool::units::{GIB, MIB};
use vrampool::{DeviceBuffer, Pool, PoolBuilder};

/// A lowered maximum that only growth looks at leaves a pool above it for ever, unless somebody calls trim.
#[test]
fn a_lowered_maximum_is_kept_to_as_blocks_are_freed() {
    for source in SOURCES.into_iter().filter(|source| !source.pads()) {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let pool = machine.builder().maximum(8 * page).build().unwrap();
        let mut blocks: Vec<DeviceBuffer> = (0..8).map(|_| pool.allocate_buffer(page).unwrap()).collect();
        drop(blocks.drain(6..));
        let small = pool.allocate_buffer(1).unwrap();
        assert_eq!(machine.check(&pool).reserved_bytes, 8 * page);
        // What is idle goes at once; seven pages are in use.
        assert_eq!(pool.set_maximum(Some(3 * page + page / 2)).unwrap(), 7 * page, "{source:?}");
        assert_eq!(machine.check(&pool).capacity_bytes, Some(3 * page));
        // Free memory serves, and nothing else does.
        let other = pool.allocate_buffer(page / 2).unwrap();
        let error = pool.allocate_buffer(page).unwrap_err();
        let numbers = error.numbers().unwrap();
        assert_eq!((numbers.reserved, numbers.capacity, numbers.code), (7 * page, Some(3 * page), None), "{source:?}");
        for left in (3..7).rev() {
            drop(blocks.pop());
            assert_eq!(machine.check(&pool).reserved_bytes, left * page, "{source:?}: freed above the maximum");
        }
        // At the maximum, what is free stays.
        drop(blocks.pop());
        assert_eq!(machine.check(&pool).reserved_bytes, 3 * page);
        assert_eq!(
            (pool.config(), machine.takings()),
            (format!("{}maximum={}", kind_of(&pool), 8 * page), 8),
            "as built; nothing was made anew"
        );
        drop((small, other, blocks));
        assert_eq!(pool.set_maximum(None).unwrap(), 3 * page);
        drop(pool.allocate_buffer(20 * page).unwrap());
        machine.finish(pool);
    }
}

fn kind_of(pool: &Pool) -> String {
    let kind = pool.kind().to_string();
    if kind == "device" { String::new() } else { format!("kind={kind},") }
}

#[test]
fn a_maximum_that_is_raised_serves_what_was_refused() {
    for source in SOURCES.into_iter().filter(|source| !source.pads()) {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let pool = machine.builder().maximum(page).build().unwrap();
        assert!(pool.allocate(4 * page).unwrap_err().is_out_of_memory());
        assert!(pool.set_maximum(Some(page - 1)).unwrap_err().is_invalid_argument());
        assert_eq!(machine.check(&pool).capacity_bytes, Some(page), "a maximum that is refused changes nothing");
        pool.set_maximum(Some(4 * page)).unwrap();
        let block = pool.allocate(4 * page).unwrap();
        assert!(machine.is_usable(block, 4 * page));
        free(&pool, block).unwrap();
        machine.finish(pool);
    }
}

/// What was charged before the maximum was lowered may arrive, and is not lost to whoever asked for it.
#[test]
fn growth_under_way_while_the_maximum_is_lowered_arrives_and_goes_again() {
    for source in MAPPED {
        let page = source.page_bytes();
        for code in [None, Some(CuResult::ERROR_UNKNOWN)] {
            let machine = Machine::large(source);
            let pool = machine.builder().growth(8 * page).build().unwrap();
            if let Some(code) = code {
                machine.sim.fail(Call::MemSetAccess, 3, code);
            }
            let handle = Arc::new(OnceLock::new());
            handle.set(pool.clone()).unwrap();
            let seen = Arc::clone(&handle);
            machine.sim.set_hook(move |call| {
                if call == Call::MemMap {
                    let pool: &Pool = seen.get().unwrap();
                    pool.set_maximum(Some(2 * pool.page_bytes())).unwrap();
                    // Eight pages are charged already.
                    assert_eq!(pool.statistics().reserved_bytes, 8 * pool.page_bytes());
                    pool.check().unwrap();
                }
            });
            let result = pool.allocate_buffer(3 * page);
            machine.sim.clear_hook();
            drop(handle);
            assert_eq!(result.as_ref().err().and_then(vrampool::Error::code), code);
            if let Ok(block) = &result {
                assert!(machine.is_usable(block.address(), 3 * page));
                assert_eq!(machine.check(&pool).reserved_bytes, 3 * page, "{source:?}: what the request does not need goes");
            }
            drop(result);
            assert!(machine.check(&pool).reserved_bytes <= 2 * page);
            machine.finish(pool);
        }
    }
}

/// Giving back because a limit was lowered is nobody's wish: who frees a block hears nothing of its failure.
#[test]
fn a_free_above_the_maximum_succeeds_whatever_the_driver_does() {
    for source in SOURCES.into_iter().filter(|source| !source.pads()) {
        let page = source.page_bytes();
        for panics in [false, true] {
            let machine = Machine::large(source);
            let pool = machine.pool();
            let blocks: Vec<DeviceBuffer> = (0..4).map(|_| pool.allocate_buffer(page).unwrap()).collect();
            pool.set_maximum(Some(page)).unwrap();
            let next = vrampool::driver::sim::FaultTarget::MemoryCalls;
            if panics {
                machine.sim.panic_at(next, 0)
            } else {
                machine.sim.fail(next, 0, CuResult::ERROR_UNKNOWN)
            }
            for block in blocks {
                block.free().unwrap();
            }
            assert_eq!(machine.check(&pool).reserved_bytes, page, "{source:?}: tried again at the next free");
            machine.finish(pool);
        }
    }
}

#[test]
fn trims_that_meet_end_and_do_no_harm() {
    for source in SOURCES {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let pool = machine.pool();
        assert_eq!(pool.trim(0).unwrap(), 0, "an empty pool");
        let block = pool.allocate_buffer(3 * page).unwrap();
        let held = pool.trim(0).unwrap();
        assert!(held >= 3 * page && held <= 4 * page, "{source:?}: one block");
        drop(block);
        for _ in 0..50 {
            let blocks: Vec<_> = (0..6).map(|_| pool.allocate_buffer(page).unwrap()).collect();
            drop(blocks);
            let together = Barrier::new(3);
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        together.wait();
                        pool.trim(0).unwrap();
                    });
                }
                scope.spawn(|| {
                    together.wait();
                    pool.allocate_buffer(2 * page).unwrap().free().unwrap();
                });
            });
            machine.check(&pool);
        }
        assert_eq!(pool.trim(0).unwrap(), 0, "{source:?}");
        machine.finish(pool);
    }
}

#[test]
fn a_pool_is_trimmed_from_its_own_callback() {
    for source in SOURCES.into_iter().filter(|source| !source.pads()) {
        let page = source.page_bytes();
        let machine = Machine::large(source);
        let own: Arc<OnceLock<Pool>> = Arc::default();
        let seen = Arc::clone(&own);
        let trimming = move |_: &_| {
            seen.get().unwrap().trim(0).unwrap();
            false
        };
        let pool = machine.builder().maximum(4 * page).on_out_of_memory(trimming).build().unwrap();
        own.set(pool.clone()).unwrap();
        let block = pool.allocate_buffer(3 * page).unwrap();
        assert!(pool.allocate(2 * page).unwrap_err().is_out_of_memory());
        assert_eq!(machine.check(&pool).reserved_bytes, 3 * page);
        drop(block);
    }
}

/// One small block keeps one piece of memory, and it should not be a large one.
#[test]
fn a_small_block_keeps_one_handle_and_no_more() {
    for source in MAPPED {
        let machine = Machine::large(source);
        let pool = machine.pool();
        let fill = || (0..1024).map(|_| pool.allocate_buffer(MIB).unwrap()).collect::<Vec<_>>();
        drop(fill());
        assert_eq!(machine.check(&pool).reserved_bytes, GIB);
        assert_eq!(pool.trim(0).unwrap(), 0, "{source:?}");
        // The blocks are there first, so that the small one lies among them.
        let mut blocks = fill();
        blocks.truncate(512);
        let small = pool.allocate_buffer(256).unwrap();
        drop(blocks);
        assert_eq!(pool.trim(0).unwrap(), source.page_bytes(), "{source:?}: a page is the smallest there is");
        assert_eq!(machine.pieces(), 1, "{source:?}");
        drop(small);
        assert_eq!(pool.trim(0).unwrap(), 0, "{source:?}");
        // Memory that was made for one large block comes in larger pieces, and one of them is what stays.
        drop(pool.allocate_buffer(GIB).unwrap());
        let small = pool.allocate_buffer(256).unwrap();
        assert!(pool.trim(0).unwrap() <= 32 * MIB && machine.pieces() == 1, "{source:?}");
        drop(small);
        machine.finish(pool);
    }
}

/// A program that trims after each of its steps to what the step needs must not pay for it.
#[test]
fn trimming_to_the_peak_gives_nothing_back() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        let step = || {
            let blocks: Vec<_> = (1..=8).map(|size| pool.allocate_buffer(size * MIB + 1).unwrap()).collect();
            let peak = pool.statistics().reserved_bytes;
            drop(blocks);
            assert_eq!(pool.trim(peak).unwrap(), peak, "{source:?}");
            (peak, machine.memory_calls())
        };
        let first = step();
        for _ in 1..1000 {
            assert_eq!(step(), first, "{source:?}: held, and calls so far");
        }
        machine.finish(pool);
    }
}

/// Where memory is mapped by pages, free pages of two places serve one request; elsewhere the error says what is there.
#[test]
fn two_free_stretches_serve_one_request_where_pages_are_mapped() {
    let machine = Machine::new(MAPPED[1], 8 * GIB);
    for no_vmm in [false, true] {
        let pool = machine.builder().no_vmm(no_vmm).build().unwrap();
        let first = pool.allocate_buffer(GIB).unwrap();
        let second = pool.allocate_buffer(4 * GIB).unwrap();
        drop(second);
        let kept = [pool.allocate_buffer(GIB).unwrap(), pool.allocate_buffer(GIB).unwrap()];
        match pool.allocate_buffer(4 * GIB) {
            Ok(block) => assert!(!no_vmm && machine.is_usable(block.address(), 4 * GIB)),
            Err(error) => {
                let numbers = error.numbers().unwrap_or_else(|| panic!("{error}"));
                assert!(no_vmm, "{error}");
                assert_eq!((numbers.idle, numbers.largest_free, numbers.driver_free), (2 * GIB, 2 * GIB, Some(3 * GIB)));
                assert!(error.to_string().contains("longest stretch 2 GiB"), "{error}");
            }
        }
        drop((first, kept));
        machine.finish(pool);
    }
    assert_eq!(machine.sim.held_bytes(DEVICE), 0);
}

/// A clock that stands until it is told to go on, and counts who looks at it.
#[derive(Clone, Debug, Default)]
struct Time(Arc<AtomicU64>, Arc<AtomicU64>);

impl Time {
    fn pass(&self, milliseconds: u64) {
        self.0.fetch_add(milliseconds, Ordering::Relaxed);
    }

    fn looks(&self) -> u64 {
        self.1.load(Ordering::Relaxed)
    }

    /// A builder with a period of a second.
    fn builder(&self, machine: &Machine) -> PoolBuilder {
        let time = self.clone();
        machine.builder().slack(0.0).configure("decay=1s").unwrap().clock(move || {
            time.1.fetch_add(1, Ordering::Relaxed);
            Duration::from_millis(time.0.load(Ordering::Relaxed))
        })
    }
}

/// A peak that has passed is held for ever without decay; given back at once, it is made anew all the time.
#[test]
fn what_was_not_needed_for_a_whole_period_goes() {
    for source in SOURCES.into_iter().filter(|source| !source.pads()) {
        let page = source.page_bytes();
        let (machine, time) = (Machine::large(source), Time::default());
        let pool = time.builder(&machine).build().unwrap();
        let blocks = |count: u64| (0..count).map(|_| pool.allocate_buffer(page).unwrap()).collect::<Vec<_>>();
        let kept = blocks(1);
        for _ in 0..5 {
            // The same need in every period, however little is in use at its end.
            drop(blocks(6));
            time.pass(1000);
            assert_eq!(pool.decay().unwrap(), 7 * page, "{source:?}");
        }
        assert_eq!(machine.takings(), 7, "{source:?}: made once");
        // The need is less; the period that has seen the last of the peak must end, and one more.
        drop(blocks(2));
        time.pass(999);
        drop(blocks(2));
        assert_eq!(machine.check(&pool).reserved_bytes, 7 * page, "{source:?}: the period has not ended");
        time.pass(1);
        drop(blocks(1));
        assert_eq!(machine.check(&pool).reserved_bytes, 3 * page, "{source:?}: by the way of an allocation and a free");
        // A program that goes idle, and looks in long after.
        time.pass(60_000);
        assert_eq!(pool.decay().unwrap(), page, "{source:?}: what is in use stays");
        drop(blocks(9));
        assert_eq!(machine.check(&pool).reserved_bytes, 10 * page, "{source:?}: and it grows again");
        drop(kept);
        time.pass(2000);
        assert_eq!(pool.decay().unwrap(), 0, "{source:?}");
        machine.finish(pool);
    }
}

#[test]
fn nobody_looks_at_the_clock_for_a_slot_or_without_decay() {
    let (machine, time) = (Machine::large(MAPPED[1]), Time::default());
    let pool = time.builder(&machine).build().unwrap();
    let first = pool.allocate_buffer(300).unwrap();
    let looks = time.looks();
    for _ in 0..10 {
        drop(pool.allocate_buffer(300).unwrap());
        drop(pool.statistics());
    }
    assert_eq!(time.looks(), looks);
    drop(pool.allocate_buffer(100_000).unwrap());
    assert_eq!(time.looks(), looks + 2, "a span is taken and given");
    drop(first);
    machine.finish(pool);
    let clock = || -> Duration { panic!("there is no decay to look for") };
    let pool = machine.builder().clock(clock).build().unwrap();
    drop(pool.allocate_buffer(MIB).unwrap());
    assert_eq!((pool.decay().unwrap(), pool.config()), (2 * MIB, String::new()), "nothing goes, and no text tells of a clock");
    machine.finish(pool);
    assert!(machine.builder().decay(Duration::ZERO).build().unwrap_err().is_invalid_argument());
}

/// Larger pieces than what is to go would take what is needed along.
#[test]
fn decay_takes_no_more_than_was_not_needed() {
    let (machine, time) = (Machine::large(MAPPED[1]), Time::default());
    let pool = time.builder(&machine).build().unwrap();
    drop(pool.allocate_buffer(8 * GIB).unwrap());
    let largest = 32 * MIB;
    time.pass(1000);
    assert_eq!(pool.decay().unwrap(), 8 * GIB);
    for need in [GIB + 5 * MIB, GIB, 7 * MIB] {
        drop(pool.allocate_buffer(need).unwrap());
        time.pass(1000);
        pool.decay().unwrap();
        drop(pool.allocate_buffer(need).unwrap());
        time.pass(1000);
        let held = pool.decay().unwrap();
        assert!(held >= need && held < need + largest, "{held} for {need}");
    }
    machine.finish(pool);
}

/// Who allocates or frees has not asked for memory to be given back, and gets what it asked for.
#[test]
fn decay_by_the_way_fails_in_silence_and_is_made_up_for() {
    for panics in [false, true] {
        let (machine, time) = (Machine::large(MAPPED[1]), Time::default());
        let pool = time.builder(&machine).build().unwrap();
        drop((0..8).map(|_| pool.allocate_buffer(2 * MIB).unwrap()).collect::<Vec<_>>());
        let block = pool.allocate_buffer(2 * MIB).unwrap();
        time.pass(5000);
        let next = vrampool::driver::sim::FaultTarget::MemoryCalls;
        if panics {
            machine.sim.panic_at(next, 0)
        } else {
            machine.sim.fail(next, 0, CuResult::ERROR_UNKNOWN)
        }
        block.free().unwrap();
        machine.check(&pool);
        time.pass(5000);
        assert_eq!(pool.decay().unwrap() + pool.trim(0).unwrap(), 0);
        machine.finish(pool);
    }
}

/// Two threads at the end of a period, and a third that grows.
#[test]
fn a_period_ends_once_however_many_see_it() {
    for source in MAPPED {
        let page = source.page_bytes();
        let (machine, time) = (Machine::large(source), Time::default());
        let pool = time.builder(&machine).build().unwrap();
        for _ in 0..50 {
            drop((0..6).map(|_| pool.allocate_buffer(page).unwrap()).collect::<Vec<_>>());
            time.pass(700);
            let together = Barrier::new(3);
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        together.wait();
                        pool.decay().unwrap();
                    });
                }
                scope.spawn(|| {
                    together.wait();
                    pool.allocate_buffer(2 * page).unwrap().free().unwrap();
                });
            });
            assert!(machine.check(&pool).reserved_bytes <= 8 * page, "{source:?}");
        }
        time.pass(9000);
        assert_eq!(pool.decay().unwrap(), 0, "{source:?}");
        machine.finish(pool);
    }
}

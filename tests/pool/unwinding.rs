//! A fault at every call of the driver, as an error and as a panic, alone and beside other threads.

use crate::support::{DEVICE, Draw, Machine, Owners, SOURCES, Source, free};
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::thread;
use vrampool::driver::sim::FaultTarget;
use vrampool::error::CuResult;
use vrampool::units::{KIB, MIB};
use vrampool::{DevicePtr, Pool, Result};

/// How a call goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Fails(CuResult),
    Panics,
}

const FAULTS: [Fault; 3] = [Fault::Fails(CuResult::ERROR_OUT_OF_MEMORY), Fault::Fails(CuResult::ERROR_UNKNOWN), Fault::Panics];

/// Says nothing of panics that were planned, of which there are thousands, each with its backtrace.
fn hush() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let loud = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !info.payload().downcast_ref::<String>().is_some_and(|message| message.starts_with("planned panic")) {
                loud(info);
            }
        }));
    });
}

impl Fault {
    fn plan(self, machine: &Machine, k: u64) {
        hush();
        match self {
            Self::Fails(code) => machine.sim.fail(FaultTarget::MemoryCalls, k, code),
            Self::Panics => machine.sim.panic_at(FaultTarget::MemoryCalls, k),
        }
    }
}

/// The result of `work`; `None` where a planned fault kept it from working. `struck` says whether one has come about.
fn attempt<T>(work: impl FnOnce() -> Result<T>, struck: impl Fn() -> bool) -> Option<T> {
    let before = struck();
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Some(value),
        Ok(Err(error)) => {
            assert!(error.is_driver() || error.is_out_of_memory(), "a fault came out as {error}");
            assert!(!before && struck(), "without a cause: {error}");
            None
        }
        Err(panic) => {
            assert!(!before && struck(), "without a cause: {panic:?}");
            None
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Allocate so much, at such an alignment.
    Take(u64, u64),
    /// Free the block with this number, counted round.
    Give(usize),
    Trim(u64),
}

/// Blocks of every kind, growth by steps, gaps that are filled, memory that goes back in part and in whole.
fn script(page: u64) -> Vec<Step> {
    use Step::{Give, Take, Trim};
    vec![
        Take(256, 1),
        Take(5000, 1),
        Take(100 * KIB, 1),
        Take(page - 1, 1),
        Take(3 * page, 1),
        Give(3),
        Take(page + 1, 4 * MIB),
        Take(300, 512),
        Give(0),
        Trim(page),
        Take(5 * page + 77, 1),
        Take(64 * KIB, 64 * KIB),
        Give(2),
        Give(2),
        Trim(0),
        Take(2 * page, 1),
        Take(9 * page, 1),
        Give(4),
        Take(7 * page, 2 * MIB),
        Give(1),
        Trim(2 * page),
        Take(4 * page, 1),
        Take(KIB, 1),
    ]
}

/// Plays the script, which may be disturbed once, and checks after every step that the pool and the blocks are sound.
fn play(machine: &Machine, pool: &Pool, live: &mut Vec<(DevicePtr, u64)>) {
    let struck = || machine.sim.faults_planned() == 0;
    for step in script(machine.source.page_bytes()) {
        match step {
            Step::Take(size, alignment) => {
                if let Some(address) = attempt(|| pool.allocate_aligned(size, alignment), struck) {
                    live.push((address, size));
                }
            }
            Step::Give(which) => {
                if !live.is_empty() {
                    let (address, _) = live.remove(which % live.len());
                    free(pool, address).unwrap();
                }
            }
            Step::Trim(to) => _ = attempt(|| pool.trim(to), struck),
        }
        let statistics = machine.check(pool);
        assert_eq!((statistics.live_blocks, statistics.requested_bytes), (live.len() as u64, live.iter().map(|(_, size)| size).sum()));
        assert!(live.iter().all(|&(address, size)| machine.is_usable(address, size)), "after {step:?}");
    }
}

/// After any fault: what lived still lives and can be freed, what is asked for is had, and nothing is outstanding.
fn finish(machine: &Machine, pool: Pool, live: Vec<(DevicePtr, u64)>, maximum: u64) {
    machine.sim.clear_faults();
    machine.check(&pool);
    let owners = Owners::default();
    live.iter().for_each(|&(address, size)| owners.take(address, size));
    let later = pool.allocate(machine.source.page_bytes()).unwrap();
    owners.take(later, machine.source.page_bytes());
    for (address, _) in live {
        free(&pool, address).unwrap();
        assert!(free(&pool, address).is_err());
    }
    free(&pool, later).unwrap();
    let all = if machine.source.pads() { maximum - machine.source.page_bytes() } else { maximum };
    let whole = pool.allocate(all).unwrap_or_else(|error| panic!("all the memory as one block: {error}"));
    assert!(machine.is_usable(whole, all));
    free(&pool, whole).unwrap();
    assert_eq!(pool.trim(0).unwrap(), 0);
    assert!(machine.sim.peak_bytes(DEVICE) <= maximum);
    machine.finish(pool);
}

/// Pages that the script and the pool may have.
const PAGES: u64 = 40;

/// Builds the pool, which takes memory at once; `None` where the fault came then.
fn build(machine: &Machine) -> Option<Pool> {
    let page = machine.source.page_bytes();
    let builder = machine.builder().initial(2 * page).growth(3 * page).maximum(PAGES * page);
    let pool = attempt(|| builder.build(), || machine.sim.faults_planned() == 0);
    if pool.is_none() {
        machine.sim.audit().unwrap();
    }
    pool
}

/// How many calls the script makes when nothing goes wrong.
fn calls_of(source: Source) -> u64 {
    let machine = Machine::large(source);
    // A fault that is never reached, so that the run is the same.
    machine.sim.fail(FaultTarget::MemoryCalls, u64::MAX, CuResult::ERROR_UNKNOWN);
    let pool = build(&machine).unwrap();
    let mut live = Vec::new();
    play(&machine, &pool, &mut live);
    let calls = machine.memory_calls();
    finish(&machine, pool, live, PAGES * source.page_bytes());
    calls
}

/// An operation that fails half-way leaves memory that nobody owns, or that two do; a panic leaves a lock held for ever.
#[test]
fn a_fault_at_any_call_leaves_the_pool_as_sound_as_before() {
    for source in SOURCES {
        let calls = calls_of(source);
        assert!(calls >= 5, "{source:?}: {calls}");
        for (k, fault) in (0..calls).flat_map(|k| FAULTS.map(|fault| (k, fault))) {
            let machine = Machine::large(source);
            fault.plan(&machine, k);
            let Some(pool) = build(&machine) else { continue };
            let mut live = Vec::new();
            play(&machine, &pool, &mut live);
            // The calls up to the fault are those of the clean run, so it has come.
            assert_eq!(machine.sim.faults_planned(), 0, "{source:?}: {fault:?} at {k} did not come");
            finish(&machine, pool, live, PAGES * source.page_bytes());
        }
    }
}

/// The unwinding of one fault meets another, one or a few calls later.
#[test]
fn a_second_fault_while_the_first_is_unwound_does_no_more_harm() {
    for source in [SOURCES[1], SOURCES[5]] {
        let calls = calls_of(source);
        for (k, fault) in (0..calls).flat_map(|k| FAULTS.map(|fault| (k, fault))) {
            for (after, second) in (0..3).flat_map(|after| [FAULTS[1], FAULTS[2]].map(|second| (after, second))) {
                let machine = Machine::large(source);
                // A planned fault counts calls from the beginning, the one before it among them.
                fault.plan(&machine, k);
                second.plan(&machine, k + 1 + after);
                let page = source.page_bytes();
                let builder = machine.builder().initial(2 * page).growth(3 * page).maximum(PAGES * page);
                let Ok(Ok(pool)) = catch_unwind(AssertUnwindSafe(|| builder.build())) else {
                    continue;
                };
                let mut live = Vec::new();
                for step in script(page) {
                    match step {
                        Step::Take(size, alignment) => {
                            if let Ok(Ok(address)) = catch_unwind(AssertUnwindSafe(|| pool.allocate_aligned(size, alignment))) {
                                live.push((address, size));
                            }
                        }
                        Step::Give(which) if !live.is_empty() => {
                            let (address, _) = live.remove(which % live.len());
                            free(&pool, address).unwrap();
                        }
                        Step::Give(_) => {}
                        Step::Trim(to) => _ = catch_unwind(AssertUnwindSafe(|| pool.trim(to))),
                    }
                    machine.check(&pool);
                }
                finish(&machine, pool, live, PAGES * page);
            }
        }
    }
}

/// A destructor that panics ends the process, and one that stops at the first refusal leaks all the rest.
#[test]
fn the_last_handle_goes_quietly_whatever_fails() {
    for source in SOURCES {
        let build = || {
            let machine = Machine::large(source);
            let page = source.page_bytes();
            let pool = machine.builder().initial(2 * page).build().unwrap();
            let blocks = [5 * page, 3 * page].map(|size| pool.allocate(size).unwrap());
            free(&pool, blocks[0]).unwrap();
            let begin = machine.memory_calls();
            (machine, pool, begin)
        };
        let (machine, pool, begin) = build();
        drop(pool);
        let calls = machine.memory_calls() - begin;
        machine.sim.audit().unwrap();
        for (k, fault) in (0..calls).flat_map(|k| FAULTS.map(|fault| (k, fault))) {
            let (machine, pool, _) = build();
            fault.plan(&machine, k);
            drop(pool);
            assert_eq!(machine.sim.faults_planned(), 0);
            machine.sim.audit().unwrap_or_else(|error| panic!("{source:?}: {fault:?} at {k} of {calls}: {error}"));
        }
    }
}

/// A lock that stays held, or is poisoned, after one thread's misfortune stops all the others.
#[test]
fn a_fault_in_one_thread_is_no_matter_to_the_others() {
    for source in [SOURCES[0], SOURCES[1], SOURCES[3], SOURCES[5], SOURCES[6]] {
        let page = source.page_bytes();
        for (k, fault) in (0..calls_of(source)).flat_map(|k| FAULTS.map(|fault| (k, fault))) {
            let machine = Machine::large(source);
            let builder = machine.builder().growth(3 * page).maximum(PAGES * page);
            let pool = builder.build().unwrap();
            fault.plan(&machine, k);
            let owners = Owners::default();
            let left: Vec<(DevicePtr, u64)> = thread::scope(|scope| {
                let work = |thread: u64| {
                    let mut draw = Draw(thread);
                    let mut live: Vec<(DevicePtr, u64)> = Vec::new();
                    for _ in 0..40 {
                        match draw.below(8) {
                            0 => _ = catch_unwind(AssertUnwindSafe(|| pool.trim(0))),
                            1..=4 => {
                                let size = draw.between(1, 3 * page);
                                // Whoever it strikes, it strikes once; and there is room for all.
                                match catch_unwind(AssertUnwindSafe(|| pool.allocate(size))) {
                                    Ok(Ok(address)) => {
                                        owners.take(address, size);
                                        live.push((address, size));
                                    }
                                    Ok(Err(error)) => assert!(error.is_driver() || error.is_out_of_memory(), "{error}"),
                                    Err(_) => assert_eq!(fault, Fault::Panics),
                                }
                                if live.len() > 2 {
                                    let (address, _) = live.swap_remove(0);
                                    owners.give(address);
                                    free(&pool, address).unwrap();
                                }
                            }
                            _ if live.is_empty() => {}
                            _ => {
                                let (address, _) = live.swap_remove(draw.below(live.len() as u64) as usize);
                                owners.give(address);
                                free(&pool, address).unwrap();
                            }
                        }
                        pool.check().unwrap();
                    }
                    live
                };
                let threads: Vec<_> = (0..3).map(|thread| scope.spawn(move || work(thread))).collect();
                threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
            });
            let statistics = machine.check(&pool);
            assert_eq!(statistics.live_blocks, left.len() as u64);
            assert!(left.iter().all(|&(address, size)| machine.is_usable(address, size)));
            finish(&machine, pool, left, PAGES * page);
        }
    }
}

//! Models of concurrent growth: a few threads on one pool, run under many schedules by the crate `shuttle`.
//!
//! Each lock, condition variable and counter of the pool and of the simulated device is a point at which another thread may go
//! on. Every model checks at the begin of every driver call, of which none is made under the pool's lock, that the law of bytes
//! holds and the limit is kept; at the end that the pool's invariants hold, that the whole memory can be had in one piece, and
//! that nothing is outstanding when the pool is gone. A refusal must be borne out by its own numbers (I7): what is live and
//! what was asked for are more than the memory. A schedule in which nobody can go on is a failure as well.
//!
//! Each model has a twin that plants a fault and expects it to fail.

mod schedules;

use crate::driver::sim::{SimConfig, SimDriver};
use crate::driver::{Call, Device, Driver, MemoryKind};
use crate::error::{CuResult, Error, Result};
use crate::sync::{Arc, Mutex};
use crate::units::{DeviceId, KIB, MIB};
use crate::{DeviceBuffer, Pool, PoolBuilder};
use schedules::{assert_noticed, explore};
use shuttle::thread::{JoinHandle, spawn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

const DEVICE: DeviceId = DeviceId(0);
const PAGE: u64 = 2 * MIB;

/// A place that models look at beside the pool, with a lock that is no scheduling point.
type Cell<T> = Arc<std::sync::Mutex<T>>;

/// A simulated machine and a pool on it.
struct Machine {
    sim: Arc<SimDriver>,
    pool: Pool,
    /// The pool, while it is watched at every driver call.
    watched: Cell<Option<Pool>>,
    /// What was found wrong at a driver call. It is told at the end, since a panic there is the driver's.
    violation: Cell<Option<String>>,
    /// The most bytes that the pool may hold.
    limit: u64,
}

impl Machine {
    /// A device with `device_pages` pages of memory, and a pool of at most as many as `change` says.
    fn new(device_pages: u64, maximum: Option<u64>, change: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Self {
        Self::on(SimConfig::default().capacity(device_pages * PAGE), maximum, change)
    }

    fn on(config: SimConfig, maximum: Option<u64>, change: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Self {
        let memory = config.devices[0].properties.total_bytes;
        let sim = SimDriver::new(config);
        let device = Device::new(Arc::clone(&sim) as Arc<dyn Driver>, DEVICE).unwrap();
        let mut builder = Pool::builder().device(device);
        if let Some(pages) = maximum {
            builder = builder.maximum(pages * PAGE);
        }
        let pool = change(builder).build().unwrap();
        let machine =
            Self { sim, pool, watched: Cell::default(), violation: Cell::default(), limit: maximum.map_or(memory, |pages| pages * PAGE) };
        machine.watch(|_| ());
        machine
    }

    /// Watches the pool from now on, and calls `also` at every call.
    fn watch(&self, also: impl Fn(Call) + Send + Sync + 'static) {
        *self.watched.lock().unwrap() = Some(self.pool.clone());
        let (watched, violation) = (Arc::clone(&self.watched), Arc::clone(&self.violation));
        self.sim.set_hook(move |call| {
            let pool = watched.lock().unwrap().clone();
            if let Some(Err(error)) = pool.map(|pool| pool.check()) {
                violation.lock().unwrap().get_or_insert(error);
            }
            also(call);
        });
    }

    /// Lets go of the pool, so that it goes with its last handle.
    fn look_away(&self) {
        let pool = self.watched.lock().unwrap().take();
        drop(pool);
    }

    /// Blocks of a page each.
    fn blocks<const N: usize>(&self) -> [DeviceBuffer; N] {
        std::array::from_fn(|_| self.pool.allocate_buffer(PAGE).unwrap())
    }

    /// A thread that asks for `bytes` bytes, and finds them usable where it gets them.
    fn grower(&self, bytes: u64) -> JoinHandle<Result<DeviceBuffer>> {
        let (sim, pool, limit) = (Arc::clone(&self.sim), self.pool.clone(), self.limit);
        spawn(move || grow(&sim, &pool, bytes, limit))
    }

    fn trimmer(&self) -> JoinHandle<Result<()>> {
        let pool = self.pool.clone();
        spawn(move || pool.trim(0).map(drop))
    }

    /// What is asked when all threads have ended.
    fn finish(self, live: impl IntoIterator<Item = DeviceBuffer>) {
        let live: Vec<DeviceBuffer> = live.into_iter().collect();
        assert_eq!(*self.violation.lock().unwrap(), None);
        for buffer in &live {
            assert!(self.sim.is_writable(DEVICE, buffer.address(), buffer.size()), "a live block is not usable");
        }
        let statistics = self.pool.statistics();
        assert_eq!(statistics.requested_bytes, live.iter().map(DeviceBuffer::size).sum::<u64>());
        self.pool.check().unwrap();
        assert_eq!(statistics.reserved_bytes, self.sim.held_bytes(DEVICE));
        assert!(self.sim.peak_bytes(DEVICE) <= self.limit, "more was held than the limit");
        drop(live);
        drop(self.pool.allocate_buffer(self.limit).expect("the whole memory is free"));
        self.look_away();
        drop(self.pool);
        self.sim.audit().unwrap();
    }
}

fn grow(sim: &SimDriver, pool: &Pool, bytes: u64, limit: u64) -> Result<DeviceBuffer> {
    let result = pool.allocate_buffer(bytes);
    match &result {
        Ok(buffer) => assert!(sim.is_writable(DEVICE, buffer.address(), bytes), "a new block is not usable"),
        Err(error) => {
            if let Some(numbers) = error.numbers() {
                assert!(numbers.live + numbers.rounded > limit, "refused without need: {numbers:?}");
            }
        }
    }
    result
}

fn joined<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// Two growers, and room for both; the second may get the end of the first one's pages.
fn room_for_both() {
    let machine = Machine::new(64, Some(4), |builder| builder);
    let threads = [machine.grower(PAGE + 16 * KIB), machine.grower(PAGE / 2)];
    let buffers = threads.map(|thread| joined(thread).unwrap());
    machine.finish(buffers);
}

#[test]
fn two_growers_with_room_for_both() {
    explore(2, room_for_both);
}

#[test]
fn access_is_set_before_anyone_gets_a_page() {
    assert_noticed("window_before_access", 1, room_for_both, "a new block is not usable");
}

/// Two growers, and room for one and for what a neighbour frees.
fn room_for_one() {
    let machine = Machine::new(64, Some(3), |builder| builder);
    let [block, other] = machine.blocks();
    let threads = [machine.grower(PAGE), machine.grower(PAGE)];
    block.free().unwrap();
    let buffers = threads.map(joined);
    // Who was refused was too early.
    assert!(buffers.iter().any(Result::is_ok), "both were refused");
    let again = machine.pool.allocate_buffer(if buffers.iter().all(Result::is_ok) { 0 } else { PAGE });
    machine.finish(buffers.into_iter().flatten().chain([other, again.unwrap()]));
}

#[test]
fn two_growers_with_room_for_one_and_a_free() {
    explore(3, room_for_one);
}

#[test]
fn the_limit_is_kept_at_every_call() {
    assert_noticed("late_charge", 1, room_for_one, "P3: over capacity");
}

/// The driver's memory is the limit. A request that cannot be served takes some of it for a moment; one that can be must be.
fn futile_neighbour() {
    let machine = Machine::new(3, None, |builder| builder);
    let [block] = machine.blocks();
    let threads = [machine.grower(3 * PAGE), machine.grower(2 * PAGE)];
    let [futile, buffer] = threads.map(joined);
    assert!(futile.unwrap_err().is_out_of_memory());
    machine.finish([block, buffer.expect("there was memory for it")]);
}

#[test]
fn a_grower_beside_one_that_cannot_be_served() {
    explore(2, futile_neighbour);
}

#[test]
fn a_refusal_counts_only_where_no_other_work_was_under_way() {
    assert_noticed("contest_not_noticed", 1, futile_neighbour, "refused without need");
}

/// A grower, a free of the neighbouring block and a trim: an idle page lies between, which the grower's window wants and the trim
/// gives back.
fn grow_free_trim() {
    let machine = Machine::new(64, Some(4), |builder| builder);
    let [block, idle] = machine.blocks();
    drop(idle);
    let threads = (machine.grower(3 * PAGE), machine.trimmer());
    block.free().unwrap();
    let buffer = joined(threads.0).expect("there is room for it at any time");
    joined(threads.1).unwrap();
    machine.finish([buffer]);
}

#[test]
fn a_grower_a_free_and_a_trim() {
    explore(3, grow_free_trim);
}

#[test]
fn handles_to_be_given_back_are_chosen_under_the_lock() {
    assert_noticed("handle_chosen_outside_lock", 1, grow_free_trim, "");
}

#[test]
fn nobody_is_refused_while_other_work_is_under_way() {
    assert_noticed("refuse_without_waiting", 1, grow_free_trim, "refused without need");
}

/// Two growers at the limit whose windows want the same idle handles, and a free between these.
fn same_idle_handles() {
    let machine = Machine::new(64, Some(4), |builder| builder);
    let [first, between, second, last] = machine.blocks();
    drop((first, second));
    let threads = [machine.grower(2 * PAGE), machine.grower(2 * PAGE)];
    between.free().unwrap();
    let buffers = threads.map(joined);
    assert_eq!(buffers.iter().filter(|buffer| buffer.is_ok()).count(), 1, "one has room, and not both");
    machine.finish(buffers.into_iter().flatten().chain([last]));
}

#[test]
fn two_growers_that_move_the_same_handles() {
    explore(2, same_idle_handles);
}

#[test]
fn handles_that_are_moved_leave_the_tree() {
    assert_noticed("moved_grains_stay_free", 1, same_idle_handles, "");
}

/// Two growers with room for one; the driver fails the first that maps.
fn failing_driver() {
    let machine = Machine::new(64, Some(2), |builder| builder);
    machine.sim.fail(Call::MemMap, 0, CuResult::ERROR_UNKNOWN);
    let threads = [machine.grower(2 * PAGE), machine.grower(2 * PAGE)];
    let (buffers, errors): (Vec<_>, Vec<_>) = threads.map(joined).into_iter().partition(Result::is_ok);
    let code = errors.into_iter().find_map(|error| error.unwrap_err().code());
    assert_eq!((buffers.len(), code), (1, Some(CuResult::ERROR_UNKNOWN)), "the one that the driver served");
    machine.finish(buffers.into_iter().flatten());
}

#[test]
fn a_driver_failure_while_another_waits() {
    explore(2, failing_driver);
}

#[test]
fn whoever_waits_is_woken() {
    assert_noticed("settled_quietly", 1, failing_driver, "deadlock");
}

/// The same with a panic in the driver.
fn panicking_driver() {
    let machine = Machine::new(64, Some(2), |builder| builder);
    let maps = std::sync::atomic::AtomicU64::new(0);
    machine.watch(move |call| {
        if call == Call::MemMap && maps.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0 {
            // A panic that is nobody's failure: it is not reported.
            resume_unwind(Box::new("the driver's"));
        }
    });
    let threads = [(); 2].map(|()| {
        let (sim, pool, limit) = (Arc::clone(&machine.sim), machine.pool.clone(), machine.limit);
        spawn(move || catch_unwind(AssertUnwindSafe(|| grow(&sim, &pool, 2 * PAGE, limit))))
    });
    let (ended, panics): (Vec<_>, Vec<_>) = threads.map(joined).into_iter().partition(Result::is_ok);
    for panic in panics.iter().map(|panic| panic.as_ref().unwrap_err()) {
        assert_eq!(panic.downcast_ref(), Some(&"the driver's"));
    }
    assert_eq!(panics.len(), 1);
    let buffer = ended.into_iter().flatten().next().unwrap().expect("there was memory for it");
    machine.finish([buffer]);
}

#[test]
fn a_panic_in_the_driver_while_another_waits() {
    explore(2, panicking_driver);
}

#[test]
fn work_that_panics_is_settled() {
    assert_noticed("panic_not_settled", 1, panicking_driver, "deadlock");
}

/// The pool's last handle goes while buffers live in other threads; the driver refuses once to take a page back.
fn last_handle() {
    let machine = Machine::new(64, Some(4), |builder| builder);
    let [one, other] = machine.blocks();
    let Machine { sim, pool, watched, .. } = machine;
    watched.lock().unwrap().take();
    sim.clear_hook();
    sim.fail(Call::MemUnmap, 0, CuResult::ERROR_UNKNOWN);
    let seen = Arc::clone(&sim);
    let threads = [
        spawn(move || drop(pool)),
        spawn(move || {
            assert!(seen.is_writable(DEVICE, one.address(), one.size()), "the pool went before its last buffer");
            drop(one);
        }),
        spawn(move || other.free().unwrap()),
    ];
    threads.into_iter().for_each(joined);
    sim.audit().unwrap();
}

#[test]
fn the_last_handle_goes_while_buffers_live() {
    explore(2, last_handle);
}

#[test]
fn what_a_closing_pool_cannot_give_back_is_tried_again() {
    assert_noticed("closed_once", 0, last_handle, "reservation");
}

/// A callback that trims and frees while another thread grows: both have room then.
fn freeing_callback() {
    let own = Cell::<Option<Pool>>::default();
    let kept: Arc<Mutex<Vec<DeviceBuffer>>> = Arc::default();
    let (pool, blocks) = (Arc::clone(&own), Arc::clone(&kept));
    let machine = Machine::new(64, Some(4), |builder| {
        builder.on_out_of_memory(move |_| {
            let pool = pool.lock().unwrap().clone().unwrap();
            pool.trim(0).unwrap();
            let block = blocks.lock().pop();
            block.is_some()
        })
    });
    *own.lock().unwrap() = Some(machine.pool.clone());
    kept.lock().extend(machine.blocks::<2>());
    let threads = [machine.grower(3 * PAGE), machine.grower(PAGE)];
    let buffers = threads.map(|thread| joined(thread).expect("the callback makes room for both"));
    own.lock().unwrap().take();
    machine.finish(buffers);
}

#[test]
fn a_callback_frees_while_another_grows() {
    explore(2, freeing_callback);
}

#[test]
fn a_callback_is_called_without_the_lock() {
    assert_noticed("callback_under_lock", 0, freeing_callback, "already holds");
}

/// Plain allocations: idle ones have to go before the growers have room.
fn plain_allocations() {
    let config = SimConfig::default().capacity(64 * PAGE).virtual_memory_management(false);
    let machine = Machine::on(config, Some(3), |builder| builder.kind(MemoryKind::Device));
    let [idle, other] = machine.blocks();
    drop((idle, other));
    let threads = (machine.grower(2 * PAGE), machine.grower(PAGE), machine.trimmer());
    let buffers = [joined(threads.0), joined(threads.1)].map(|buffer| buffer.expect("there is room for both"));
    joined(threads.2).unwrap();
    machine.finish(buffers);
}

#[test]
fn plain_allocations_are_given_back_for_each_other() {
    explore(2, plain_allocations);
}

#[test]
fn nobody_is_refused_while_plain_memory_goes_back() {
    assert_noticed("refuse_without_waiting", 1, plain_allocations, "refused without need");
}

/// A page that the driver would not take back, and a grower that needs its memory.
fn stuck_page() {
    let machine = Machine::new(64, Some(2), |builder| builder);
    let [idle] = machine.blocks();
    drop(idle);
    machine.sim.fail(Call::MemUnmap, 0, CuResult::ERROR_UNKNOWN);
    let (grower, trimmer) = (machine.grower(2 * PAGE), machine.trimmer());
    let (buffer, trimmed) = (joined(grower), joined(trimmer));
    // The grower itself may have had to unmap the page.
    let failures = [buffer.as_ref().err(), trimmed.as_ref().err()].into_iter().flatten();
    assert!(failures.map(Error::code).all(|code| code == Some(CuResult::ERROR_UNKNOWN)));
    assert!(buffer.is_ok() || trimmed.is_ok(), "the driver failed once");
    let buffer = buffer.or_else(|_| machine.pool.allocate_buffer(2 * PAGE));
    machine.finish([buffer.expect("what is stuck is tried again")]);
}

#[test]
fn what_is_stuck_serves_a_grower_all_the_same() {
    explore(3, stuck_page);
}

#[test]
fn a_grower_waits_for_what_is_going_back() {
    assert_noticed("refuse_without_waiting", 1, stuck_page, "refused without need");
}

/// Two growers where addresses are so scarce that what one reserves has to do for both.
fn scarce_addresses() {
    let machine = Machine::on(SimConfig::default().capacity(64 * PAGE).address_space(4 * PAGE), Some(4), |builder| builder);
    let threads = [machine.grower(PAGE), machine.grower(PAGE)];
    let buffers = threads.map(|thread| joined(thread).expect("there are addresses for both"));
    machine.finish(buffers);
}

#[test]
fn one_reservation_of_addresses_does_for_two() {
    explore(2, scarce_addresses);
}

#[test]
fn whoever_waits_for_addresses_is_woken() {
    assert_noticed("settled_quietly", 1, scarce_addresses, "deadlock");
}

/// Small requests: a slot may become free while the pages of a new slab are on their way.
fn small_requests() {
    let machine = Machine::new(64, Some(2), |builder| builder);
    let small = machine.pool.allocate_buffer(64 * KIB).unwrap();
    let large = machine.pool.allocate_buffer(PAGE - 64 * KIB).unwrap();
    let threads = [machine.grower(64 * KIB), machine.grower(64 * KIB)];
    small.free().unwrap();
    let buffers = threads.map(|thread| joined(thread).expect("there is room for both"));
    machine.finish(buffers.into_iter().chain([large]));
}

#[test]
fn small_requests_while_a_slot_becomes_free() {
    explore(4, small_requests);
}

/// Two growers that ask for more than they need, where one's wish takes all there is.
fn generous_growth() {
    let machine = Machine::new(3, None, |builder| builder.growth(3 * PAGE));
    let threads = [machine.grower(PAGE), machine.grower(PAGE)];
    let buffers = threads.map(|thread| joined(thread).expect("there is memory for both"));
    machine.finish(buffers);
}

#[test]
fn a_wish_beyond_the_need_takes_nothing_from_others() {
    explore(2, generous_growth);
}

#[test]
fn whoever_is_short_waits_for_a_wish_beyond_the_need() {
    assert_noticed("settled_quietly", 1, generous_growth, "deadlock");
}

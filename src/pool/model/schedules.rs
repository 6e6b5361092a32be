//! The schedules that a model runs under.

use crate::sync::plant;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Schedule, Scheduler, Task, TaskId};
use shuttle::{Config, Runner};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Schedules drawn at random, and as many drawn by PCT.
const DRAWN: usize = 1000;
/// How many points of a schedule PCT chooses to change the order of priorities at, and one more.
const DEPTH: usize = 4;
const SEED: u64 = 0x6d6f_6465_6c73;
/// The least that catches a panic's message in a thread of a model.
const STACK_BYTES: usize = 256 << 10;

/// Runs a model under every schedule with at most `preemptions` preemptions, then under drawn ones. The number of schedules.
pub(super) fn explore(preemptions: usize, model: fn()) -> usize {
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    // The crate warns that orderings weaker than sequential consistency are not modelled.
    config.silence_warnings = true;
    let all = Runner::new(Bounded::new(preemptions), config.clone()).run(model);
    let random = Runner::new(RandomScheduler::new_from_seed(SEED, DRAWN), config.clone()).run(model);
    let by_priority = Runner::new(PctScheduler::new_from_seed(SEED, DEPTH, DRAWN), config).run(model);
    eprintln!("{all} schedules with at most {preemptions} preemptions, {random} random ones, {by_priority} by PCT");
    all + random + by_priority
}

/// Asserts that a model fails under some schedule with a fault planted, and that it says so.
pub(super) fn assert_noticed(fault: &'static str, preemptions: usize, model: fn(), said: &str) {
    plant(Some(fault));
    let outcome = catch_unwind(AssertUnwindSafe(|| explore(preemptions, model)));
    plant(None);
    let payload = outcome.expect_err("the fault goes unnoticed");
    let message = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied());
    let message = message.unwrap_or_default();
    assert!(message.contains(said), "{fault} was noticed by another sign: {message}");
}

/// A step at which there were several threads to go on with.
#[derive(Debug)]
struct Choice {
    /// The thread that ran before first, where it could go on.
    threads: Vec<TaskId>,
    taken: usize,
}

/// Every schedule with at most so many preemptions, one after the other, depth first. A *preemption* is a switch away from a
/// thread that could have gone on; switches from threads that wait or have ended are free, and all of them are tried.
#[derive(Debug)]
pub(super) struct Bounded {
    preemptions: usize,
    /// The choices of the last schedule.
    choices: Vec<Choice>,
    step: usize,
    spent: usize,
    begun: bool,
}

impl Bounded {
    pub(super) fn new(preemptions: usize) -> Self {
        Self { preemptions, choices: Vec::new(), step: 0, spent: 0, begun: false }
    }
}

impl Scheduler for Bounded {
    fn new_execution(&mut self) -> Option<Schedule> {
        if self.begun {
            while self.choices.last().is_some_and(|choice| choice.taken + 1 == choice.threads.len()) {
                self.choices.pop();
            }
            self.choices.last_mut()?.taken += 1;
        }
        (self.begun, self.step, self.spent) = (true, 0, 0);
        Some(Schedule::new(SEED))
    }

    fn next_task(&mut self, runnable: &[&Task], current: Option<TaskId>, _is_yielding: bool) -> Option<TaskId> {
        let goes_on = current.filter(|&current| runnable.iter().any(|task| task.id() == current));
        if self.step == self.choices.len() {
            let others = runnable.iter().map(|task| task.id()).filter(|&id| Some(id) != goes_on);
            let others = others.take(if goes_on.is_some() && self.spent == self.preemptions { 0 } else { usize::MAX });
            self.choices.push(Choice { threads: goes_on.into_iter().chain(others).collect(), taken: 0 });
        }
        let choice = &self.choices[self.step];
        let next = choice.threads[choice.taken];
        self.spent += usize::from(goes_on.is_some_and(|current| current != next));
        self.step += 1;
        Some(next)
    }

    fn next_u64(&mut self) -> u64 {
        unreachable!("no model draws numbers")
    }
}

/// The number of schedules of two threads of `a` and `b` steps each, by preemptions, is known: the scheduler finds all.
#[test]
fn every_schedule_within_the_bound_is_run_once() {
    use crate::sync::{AtomicU64, Ordering};
    use std::collections::BTreeSet;
    use std::sync::{Arc, Mutex};

    for preemptions in 0..4 {
        let seen = Arc::new(Mutex::new(BTreeSet::new()));
        let orders = Arc::clone(&seen);
        let count = Runner::new(Bounded::new(preemptions), Config::new()).run(move || {
            let order = Arc::new(Mutex::new(Vec::new()));
            let point = Arc::new(AtomicU64::new(0));
            let threads: Vec<_> = (0..2)
                .map(|name| {
                    let (order, point) = (Arc::clone(&order), Arc::clone(&point));
                    shuttle::thread::spawn(move || {
                        for _ in 0..3 {
                            point.fetch_add(1, Ordering::Relaxed);
                            order.lock().unwrap().push(name);
                        }
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            orders.lock().unwrap().insert(order.lock().unwrap().clone());
        });
        let seen = seen.lock().unwrap();
        println!("{preemptions}: {count} schedules, {} orders", seen.len());
        let switches = |order: &[i32]| order.windows(2).filter(|pair| pair[0] != pair[1]).count();
        // Of two threads one switch is free, where the first has ended.
        let reachable = (0..1 << 6_u32)
            .map(|bits: u32| (0..6).map(|at| (bits >> at & 1) as i32).collect::<Vec<_>>())
            .filter(|order| order.iter().sum::<i32>() == 3 && switches(order) <= preemptions + 1);
        for order in reachable {
            assert!(seen.contains(&order), "{order:?} was not run with {preemptions} preemptions");
        }
        assert!(seen.iter().all(|order| switches(order) <= preemptions + 1));
    }
}

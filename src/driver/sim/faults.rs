//! Planned failures, and the count of calls that they are planned by.

use crate::driver::{Call, DriverResult};
use crate::error::CuResult;
use crate::sync::{Arc, AtomicU64, Mutex, Ordering};
use std::fmt;

/// Which calls a planned fault counts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FaultTarget {
    /// One call of the trait.
    Call(Call),
    /// Every call that [manages memory](Call::manages_memory).
    MemoryCalls,
    /// Every call.
    AnyCall,
}

impl From<Call> for FaultTarget {
    fn from(call: Call) -> Self {
        Self::Call(call)
    }
}

impl FaultTarget {
    fn covers(self, call: Call) -> bool {
        match self {
            Self::Call(one) => one == call,
            Self::MemoryCalls => call.manages_memory(),
            Self::AnyCall => true,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Outcome {
    Fail(CuResult),
    Panic,
}

#[derive(Debug)]
struct Plan {
    target: FaultTarget,
    /// Calls to let pass before the fault.
    remaining: u64,
    outcome: Outcome,
}

type Hook = Arc<dyn Fn(Call) + Send + Sync>;

#[derive(Default)]
struct Armed {
    plans: Vec<Plan>,
    hook: Option<Hook>,
}

/// Counts calls, and decides which of them fail.
pub(super) struct Faults {
    counts: [AtomicU64; Call::ALL.len()],
    /// 1 where `armed` holds anything: a call looks here first.
    is_armed: AtomicU64,
    armed: Mutex<Armed>,
}

impl Faults {
    pub(super) fn new() -> Self {
        Self { counts: [const { AtomicU64::new(0) }; Call::ALL.len()], is_armed: AtomicU64::new(0), armed: Mutex::new(Armed::default()) }
    }

    /// Every call begins here, with no lock held.
    pub(super) fn enter(&self, call: Call) -> DriverResult<()> {
        // Relaxed: counters on their own.
        self.counts[call as usize].fetch_add(1, Ordering::Relaxed);
        // Acquire: pairs with the release in `change`, so that who sees the flag finds the plan.
        if self.is_armed.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let hook = self.armed.lock().hook.clone();
        if let Some(hook) = hook {
            hook(call);
        }
        let mut due = None;
        self.change(|armed| {
            armed.plans.retain_mut(|plan| {
                if !plan.target.covers(call) {
                    return true;
                }
                if plan.remaining == 0 && due.is_none() {
                    due = Some(plan.outcome);
                    return false;
                }
                plan.remaining = plan.remaining.saturating_sub(1);
                true
            });
        });
        match due {
            None => Ok(()),
            Some(Outcome::Fail(code)) => Err(code),
            Some(Outcome::Panic) => panic!("planned panic in {}", call.name()),
        }
    }

    fn change<T>(&self, work: impl FnOnce(&mut Armed) -> T) -> T {
        let mut armed = self.armed.lock();
        let result = work(&mut armed);
        let any = armed.hook.is_some() || !armed.plans.is_empty();
        // Release: pairs with the acquire in `enter`.
        self.is_armed.store(u64::from(any), Ordering::Release);
        result
    }

    pub(super) fn plan(&self, target: FaultTarget, k: u64, outcome: Outcome) {
        self.change(|armed| armed.plans.push(Plan { target, remaining: k, outcome }));
    }

    pub(super) fn set_hook(&self, hook: Option<Hook>) {
        self.change(|armed| armed.hook = hook);
    }

    pub(super) fn clear(&self) {
        self.change(|armed| armed.plans.clear());
    }

    pub(super) fn planned(&self) -> usize {
        self.armed.lock().plans.len()
    }

    pub(super) fn count(&self, target: FaultTarget) -> u64 {
        // Relaxed: as in `enter`.
        Call::ALL.iter().filter(|&&call| target.covers(call)).map(|&call| self.counts[call as usize].load(Ordering::Relaxed)).sum()
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let armed = self.armed.lock();
        f.debug_struct("Faults").field("plans", &armed.plans).field("hook", &armed.hook.is_some()).finish_non_exhaustive()
    }
}

//! What one thread does while another is in the middle of a driver call.

use crate::support::Machine;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread::{self, ThreadId};
use vrampool::driver::Call;

/// What another thread is about.
#[derive(Debug, Default)]
pub(crate) struct Other {
    /// Its folder under `/proc`.
    task: OnceLock<PathBuf>,
    id: OnceLock<ThreadId>,
    /// Whether it has come by.
    pub(crate) seen: AtomicBool,
    pub(crate) done: AtomicBool,
}

impl Other {
    /// To be called by that thread.
    pub(crate) fn work<T>(&self, work: impl FnOnce() -> T) -> T {
        let task = std::fs::read_link("/proc/thread-self").unwrap();
        self.id.set(thread::current().id()).unwrap();
        self.task.set(PathBuf::from("/proc").join(task)).unwrap();
        let result = work();
        self.done.store(true, Ordering::Release);
        result
    }

    /// Whether it is the thread that asks.
    pub(crate) fn is_this(&self) -> bool {
        self.id.get() == Some(&thread::current().id())
    }

    /// Whether it has ended, or the kernel has put it to sleep: it waits for someone.
    pub(crate) fn is_done_or_waits(&self) -> bool {
        let state = || {
            let stat = std::fs::read_to_string(self.task.get()?.join("stat")).ok()?;
            stat[stat.rfind(')')? + 1..].trim_start().chars().next()
        };
        self.done.load(Ordering::Acquire) || state() == Some('S')
    }
}

/// Runs `first`; in the middle of its first call of one of `calls` runs `second` on another thread, until that waits or
/// has ended. What is asserted must hold wherever the one catches up with the other; what is forbidden shows here.
pub(crate) fn amid<A: Send, B: Send>(
    machine: &Machine,
    calls: &'static [Call],
    first: impl FnOnce() -> A + Send,
    second: impl FnOnce() -> B + Send,
) -> (A, B) {
    let other = Arc::new(Other::default());
    let (begun, amid) = mpsc::channel();
    let gate = Mutex::new(Some((begun, Arc::clone(&other))));
    machine.sim.set_hook(move |call| {
        let Some((begun, other)) = calls.contains(&call).then(|| gate.lock().unwrap().take()).flatten() else { return };
        begun.send(()).unwrap();
        while !other.is_done_or_waits() {
            thread::yield_now();
        }
    });
    let results = thread::scope(|scope| {
        let first = scope.spawn(first);
        amid.recv().expect("the first thread makes no such call");
        let second = scope.spawn(|| other.work(second));
        (first.join().unwrap(), second.join().unwrap())
    });
    machine.sim.clear_hook();
    results
}

pub(crate) const TAKING: &[Call] = &[Call::MemCreate, Call::MemAlloc, Call::MemAllocHost, Call::MemAllocManaged];
pub(crate) const GIVING: &[Call] = &[Call::MemUnmap, Call::MemFree, Call::MemFreeHost];

//! A limit that several pools share.
//!
//! # Invariants
//! - L1 `held` is the sum of what the members have charged: bytes are charged before the first driver call (rule I2 of the
//!   slow path) and credited when the work is settled, both under the member's lock.
//! - L2 `held <= max(maximum, ceiling)`, where the ceiling is what was held when the maximum was set, and sinks with every
//!   byte that is given back.
//!
//! # Concurrency
//! The limit's lock is the innermost: it is taken for a few instructions at a time, with a member's lock held or without,
//! and nothing is called while it is held. No member's lock is held while another's is taken. Who waits for others'
//! work has none of its own under way and holds no lock, so members never wait for each other.

use super::Shared;
use super::core::Core;
use super::plan::{Attempt, Step};
use super::request::Request;
use crate::error::Result;
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::fmt;

#[derive(Debug, Default)]
struct Books {
    maximum: u64,
    held: u64,
    ceiling: u64,
    /// Bytes that members' work under way gives back.
    giving_back: u64,
    /// How many pieces of the members' work are under way.
    works: u64,
    /// Counts the pieces of work that have ended.
    ended: u64,
    /// Counts those of them that brought or gave back something.
    progress: u64,
    members: Vec<Weak<Shared>>,
}

#[derive(Debug, Default)]
struct Common {
    books: Mutex<Books>,
    /// Notified whenever a member's work has ended.
    ended: Condvar,
}

/// A limit on the memory of several pools together, in bytes: of any kinds, on any devices.
///
/// A `MemoryLimit` is a handle, and clones are the same limit. A pool joins it when it is built
/// ([`PoolBuilder::limit`](super::PoolBuilder::limit)), and leaves it when it is dropped. A maximum of its own
/// ([`PoolBuilder::maximum`](super::PoolBuilder::maximum)) holds beside it.
///
/// A pool for which the limit leaves too little has the other pools give idle memory back to the driver, so memory that one of them
/// does not need is there for any. That holds for the limit alone: it is a wish until the driver agrees, and where the driver refuses
/// memory that the limit would allow, other pools are not asked, as little as those without a common limit, and the error has what
/// the driver said.
///
/// The name is that of cgroups (`memory.max`, a group's memory limit) and of RMM's limiting adaptor: something that is put over
/// allocators and holds for all that they take.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// use vrampool::{Device, MemoryLimit, Pool};
///
/// let device = Device::simulated();
/// let limit = MemoryLimit::new(8 << 30);
/// let weights = Pool::builder().device(device.clone()).limit(&limit).build()?;
/// let activations = Pool::builder().device(device).limit(&limit).build()?;
///
/// drop(activations.allocate_buffer(8 << 30)?);
/// // The other pool holds all there is, and needs none of it.
/// let buffer = weights.allocate_buffer(6 << 30)?;
/// assert!(limit.held() <= limit.maximum());
/// # drop(buffer);
/// # }
/// # Ok::<(), vrampool::Error>(())
/// ```
#[derive(Clone)]
pub struct MemoryLimit(Arc<Common>);

impl MemoryLimit {
    /// A limit of so many bytes. Pools take whole pages.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let books = Books { maximum: bytes, ..Books::default() };
        Self(Arc::new(Common { books: Mutex::new(books), ended: Condvar::new() }))
    }

    /// The most that the pools may hold together, in bytes.
    #[must_use]
    pub fn maximum(&self) -> u64 {
        self.books().maximum
    }

    /// The bytes that the pools hold from the driver, or are about to take: the sum of their
    /// [`reserved_bytes`](super::Statistics::reserved_bytes). What the driver would not take back from a pool that was
    /// dropped stays among them.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.books().held
    }

    /// Sets the most that the pools may hold together, in bytes, and returns the bytes held then. What
    /// [`Pool::set_maximum`](super::Pool::set_maximum) says of one pool holds for all of them: free memory goes back until the
    /// limit holds, live blocks stay, and what is freed later goes back as it is freed.
    ///
    /// # Errors
    /// [`Error::is_driver`](crate::Error::is_driver): a driver would not take something back. The limit is set all the same.
    pub fn set_maximum(&self, bytes: u64) -> Result<u64> {
        {
            let mut books = self.books();
            (books.maximum, books.ceiling) = (bytes, books.held);
            // Who has looked at the old one looks again.
            books.ended += 1;
        }
        self.0.ended.notify_all();
        let mut outcome = Ok(());
        for member in self.members() {
            outcome = outcome.and(member.come_down());
        }
        outcome.map(|()| self.held())
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.0.books.lock()
    }

    // ---- membership ----

    pub(super) fn join(&self, member: &Arc<Shared>) {
        let mut books = self.books();
        books.members.retain(|member| member.strong_count() > 0);
        books.members.push(Arc::downgrade(member));
    }

    fn members(&self) -> Vec<Arc<Shared>> {
        // Upgraded without the lock: the last handle of a member may be gone by the time these are dropped.
        let members = self.books().members.clone();
        members.iter().filter_map(Weak::upgrade).collect()
    }

    // ---- bytes ----

    /// Charges bytes, if the limit leaves so many.
    pub(super) fn charge(&self, bytes: u64) -> bool {
        let mut books = self.books();
        if bytes > 0 && bytes > books.maximum.saturating_sub(books.held) {
            return false;
        }
        books.held += if cfg!(vrampool_fault = "budget_twice") { 2 * bytes } else { bytes };
        true
    }

    /// The bytes that the limit leaves.
    pub(super) fn room_bytes(&self) -> u64 {
        let books = self.books();
        books.maximum.saturating_sub(books.held)
    }

    /// How many bytes would have to go for the limit to hold, and are not going.
    pub(super) fn excess_bytes(&self) -> u64 {
        let books = self.books();
        (books.held - books.giving_back).saturating_sub(books.maximum)
    }

    /// Whether all but one part in `part` is held.
    pub(super) fn is_scarce(&self, part: u64) -> bool {
        let books = self.books();
        books.held >= books.maximum - books.maximum / part
    }

    // ---- work ----

    /// Notes that work has begun; it gives so many bytes back, once it is settled.
    pub(super) fn begin(&self, giving_back: u64) {
        let mut books = self.books();
        books.works += 1;
        books.giving_back += giving_back;
    }

    /// Credits bytes that are held no more, of `giving_back` that were to go, and notes that the work has ended.
    pub(super) fn end(&self, credit: u64, giving_back: u64, progress: bool) {
        let mut books = self.books();
        books.held -= credit;
        books.giving_back -= giving_back;
        books.ceiling = books.ceiling.min(books.held);
        books.works -= 1;
        books.ended += 1;
        books.progress += u64::from(progress);
        drop(books);
        self.0.ended.notify_all();
    }

    /// How many pieces of the members' work have ended: what to wait past.
    pub(super) fn ended(&self) -> u64 {
        self.books().ended
    }

    /// How many of them brought or gave back something.
    pub(super) fn progress(&self) -> u64 {
        self.books().progress
    }

    /// Whether no work is under way, and none was since so many pieces had ended.
    fn was_quiet_since(&self, ended: u64) -> bool {
        let books = self.books();
        books.works == 0 && books.ended == ended
    }

    fn wait_past(&self, ended: u64) {
        let mut books = self.books();
        while books.ended == ended {
            books = self.0.ended.wait(books);
        }
    }

    /// Checks L2, and of L1 what one member's share says.
    ///
    /// # Errors
    /// The violation found.
    pub(super) fn check(&self, share: u64) -> Result<(), String> {
        let books = self.books();
        if books.held > books.maximum.max(books.ceiling) {
            return Err(format!("L2: {} bytes are held of at most {}, and {} before", books.held, books.maximum, books.ceiling));
        }
        if share > books.held {
            return Err(format!("L1: one pool holds {share} bytes, all of them {}", books.held));
        }
        Ok(())
    }
}

impl fmt::Debug for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let books = self.books();
        f.debug_struct("MemoryLimit").field("maximum", &books.maximum).field("held", &books.held).finish_non_exhaustive()
    }
}

impl Shared {
    /// What is left to a request for which the limit leaves too little.
    pub(super) fn look_to_others(&self, limit: &MemoryLimit, core: &Core, request: &Request, attempt: &Attempt) -> Step {
        if attempt.asked != Some(limit.progress()) {
            let bytes = self.bytes_to_map(request, attempt.no_addresses);
            let padding = if attempt.no_addresses { core.buddy.arena.plain_bytes(0) } else { 0 };
            return Step::Ask { limit: limit.clone(), bytes: bytes.saturating_add(padding) };
        }
        // What others were at had its part in what the limit left: it is looked at again when that has ended.
        if limit.was_quiet_since(attempt.ended) { Step::Refuse } else { Step::Wait }
    }

    /// Has the other pools of a limit give idle memory back until it leaves `bytes` bytes, or none is left.
    pub(super) fn ask_others(&self, limit: &MemoryLimit, bytes: u64) {
        for member in limit.members() {
            let short = bytes.saturating_sub(limit.room_bytes());
            if short == 0 {
                return;
            }
            if !std::ptr::eq(&*member, self) {
                // It tells its own callers of a failure, at the next trim. Here it is memory that cannot be had.
                let _ = member.give_back_idle(short);
            }
        }
    }

    /// Waits for work that is under way, of this pool or, where it has a limit, of any under the same. `ended` is what had
    /// ended by the time that the memory was looked at.
    pub(super) fn wait_for_work<'a>(&'a self, core: MutexGuard<'a, Core>, ended: u64) -> MutexGuard<'a, Core> {
        let Some(limit) = core.limit.clone() else { return self.settled.wait(core) };
        drop(core);
        limit.wait_past(ended);
        self.core.lock()
    }
}

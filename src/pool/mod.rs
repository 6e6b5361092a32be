//! **Pool layer**: the front — options, routing, limits, growth, statistics, errors, RAII.
//!
//! [`Pool`] is a handle; all handles of a pool, and the [`DeviceBuffer`]s allocated from it, share one core behind one
//! lock. The lock is never held while the driver or a callback is called.

mod addresses;
mod budget;
#[allow(unsafe_code)] // Whoever makes a buffer of an address answers for it.
mod buffer;
mod builder;
mod core;
mod grow;
mod in_place;
#[cfg(all(test, vrampool_shuttle))]
mod model;
mod options;
mod plan;
mod request;
mod reservation;
mod statistics;
mod trim;

pub use buffer::{DeviceBuffer, FreeError};
pub use builder::PoolBuilder;
pub use reservation::Reservation;
pub use statistics::{ClassStatistics, Statistics};

use self::core::{Core, Served};
use crate::arena::Site;
use crate::driver::{Call, HandleProperties, MemoryKind};
use crate::error::{Error, OutOfMemory, Result};
use crate::sync::{Arc, Condvar, Mutex};
use crate::units::{DeviceId, DevicePtr, MIN_ALIGNMENT};
use options::Options;
use request::Request;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What is called when memory runs out: whether to look again.
#[derive(Clone)]
struct OutOfMemoryCallback(Arc<dyn Fn(&OutOfMemory) -> bool + Send + Sync>);

impl fmt::Debug for OutOfMemoryCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OutOfMemoryCallback")
    }
}

/// What all handles of a pool share.
#[derive(Debug)]
struct Shared {
    site: Arc<Site>,
    core: Mutex<Core>,
    /// Notified whenever work is settled.
    settled: Condvar,
    options: Options,
    /// The memory that could ever be held, in bytes: what requests beyond it are refused by.
    memory_bytes: u64,
    on_out_of_memory: Option<OutOfMemoryCallback>,
}

impl Shared {
    fn allocate(&self, size: u64, alignment: u64, one_handle: bool) -> Result<Served> {
        self.serve(|| {
            let request = Request::new(size, alignment, self.options.alignment)?;
            Ok(if one_handle { request.on_one_handle() } else { request })
        })
    }

    /// Serves a request, and counts where that fails.
    fn serve(&self, request: impl FnOnce() -> Result<Request>) -> Result<Served> {
        self.alive()?;
        self.counted(request().and_then(|request| self.try_serve(&request)))
    }

    fn try_serve(&self, request: &Request) -> Result<Served> {
        let mut core = self.core.lock();
        if request.block_bytes() > self.memory_bytes {
            return Err(Error::out_of_memory(core.out_of_memory(request, None, None)));
        }
        if let Some(served) = core.serve(request) {
            return Ok(served);
        }
        drop(core);
        self.grow(request)
    }

    /// Counts a failure. The lock is free.
    fn counted<T>(&self, result: Result<T>) -> Result<T> {
        if result.is_err() {
            self.core.lock().counts.failed_allocations += 1;
        }
        result
    }

    /// Asked before the lock is taken: in a forked child a thread that is not there may hold it.
    fn alive(&self) -> Result<()> {
        self.site.driver.alive().map_err(|code| Error::driver(Call::allocates(self.site.kind).name(), code))
    }

    /// Whether the driver has ended, and the memory with it: then nothing is looked at, as another process's thread may
    /// hold the lock.
    fn has_ended(&self) -> bool {
        self.site.driver.alive().is_err()
    }

    fn free(&self, address: DevicePtr, serial: Option<u32>) -> Result<()> {
        if self.has_ended() {
            return Ok(());
        }
        self.core.lock().free(address, serial).map_err(|why| Error::invalid_free(address, why))
    }

    /// The live block that begins at an address: what was asked for, and its serial.
    fn live(&self, address: DevicePtr) -> Result<(u64, u32)> {
        self.alive()?;
        self.core.lock().live(address).map_err(|why| Error::invalid_free(address, why))
    }

    fn statistics(&self) -> Statistics {
        if self.has_ended() {
            return Statistics::of_nothing();
        }
        self.core.lock().statistics()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.has_ended() {
            return;
        }
        // Nobody is left to tell of a failure, and a panic here would end the process.
        let _ = catch_unwind(AssertUnwindSafe(|| self.core.lock().buddy.arena.close()));
    }
}

/// A pool of memory of one device and one kind.
///
/// A `Pool` is a handle: clones share the pool, from any thread. The memory goes back to the driver when the last handle
/// and the last [`DeviceBuffer`] are gone; addresses from [`Pool::allocate`] are dead then, freed or not.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// use vrampool::{Device, Pool};
///
/// let pool = Pool::builder().device(Device::simulated()).maximum(1 << 30).build()?;
/// let buffer = pool.allocate_buffer(3 << 20)?;
/// assert!(buffer.address().is_aligned_to(256));
/// drop(buffer);
/// assert_eq!(pool.statistics().live_bytes, 0);
/// # }
/// # Ok::<(), vrampool::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Pool {
    shared: Arc<Shared>,
}

const _: () = {
    const fn assert_handle<T: Clone + Send + Sync>() {}
    assert_handle::<Pool>();
    const fn assert_send_sync<T: Send + Sync>() {}
    assert_send_sync::<DeviceBuffer>();
    assert_send_sync::<Reservation>();
};

impl Pool {
    /// Options for a new pool.
    pub fn builder() -> PoolBuilder {
        PoolBuilder::default()
    }

    /// Allocates at least `size` bytes at a multiple of 256 (or of the pool's own
    /// [alignment](PoolBuilder::alignment)).
    ///
    /// No work touches the block when it is returned, and it may be used on any stream. A size of 0 gives
    /// [`DevicePtr::NULL`], which may be freed any number of times.
    ///
    /// # Errors
    /// - [`Error::is_out_of_memory`]: neither free memory nor more from the driver serves the request.
    /// - [`Error::is_invalid_argument`]: no pool could serve this size.
    /// - [`Error::is_driver`]: the driver failed for another reason.
    ///
    /// # Complexity
    /// O(log n) of the memory held while free memory serves the request. Otherwise a few driver calls, without the
    /// pool's lock.
    pub fn allocate(&self, size: u64) -> Result<DevicePtr> {
        self.allocate_aligned(size, MIN_ALIGNMENT)
    }

    /// Allocates at least `size` bytes at a multiple of `alignment` bytes: a power of two, 1 GiB at the most. Smaller
    /// alignments than 256 count as 256.
    ///
    /// # Errors
    /// As [`Pool::allocate`]; [`Error::is_invalid_argument`] also for an alignment that is not such a power of two.
    ///
    /// # Complexity
    /// As [`Pool::allocate`]; above 16 KiB, O(n) of the free runs that are long enough.
    pub fn allocate_aligned(&self, size: u64, alignment: u64) -> Result<DevicePtr> {
        Ok(self.allocate_served(size, alignment, false)?.address)
    }

    /// Allocates at least `size` bytes at a multiple of `alignment` bytes, as [`Pool::allocate_aligned`], all of them in one
    /// piece of the driver's memory: one handle, or one plain allocation. Other blocks may lie on several pieces, mapped side by
    /// side. To work on the device that makes no difference, but what goes by pieces needs it: to export memory, to register
    /// it with a network card or a library that does, or to find its range by `cuMemGetAddressRange`, which answers with a handle's.
    ///
    /// It costs more: free memory that spans pieces does not serve it, pages are taken for it alone where no piece has room,
    /// and a small block takes up 16 KiB.
    ///
    /// # Errors
    /// As [`Pool::allocate_aligned`]; the numbers of a lack of memory say that it was [`contiguous`](OutOfMemory::contiguous).
    ///
    /// # Complexity
    /// O(n log n) of the handles held, and of the free runs that are long enough. Otherwise as [`Pool::allocate`].
    pub fn allocate_contiguous(&self, size: u64, alignment: u64) -> Result<DevicePtr> {
        Ok(self.allocate_served(size, alignment, true)?.address)
    }

    fn allocate_served(&self, size: u64, alignment: u64, one_handle: bool) -> Result<Served> {
        if size == 0 {
            // Nothing is allocated; the alignment is checked all the same.
            Request::new(1, alignment, self.shared.options.alignment)?;
            return Ok(Served { address: DevicePtr::NULL, serial: 0 });
        }
        self.shared.allocate(size, alignment, one_handle)
    }

    /// Allocates a block that frees itself. As [`Pool::allocate`].
    ///
    /// # Errors
    /// As [`Pool::allocate`].
    pub fn allocate_buffer(&self, size: u64) -> Result<DeviceBuffer> {
        self.allocate_buffer_aligned(size, MIN_ALIGNMENT)
    }

    /// Allocates a block that frees itself. As [`Pool::allocate_aligned`].
    ///
    /// # Errors
    /// As [`Pool::allocate_aligned`].
    pub fn allocate_buffer_aligned(&self, size: u64, alignment: u64) -> Result<DeviceBuffer> {
        let served = self.allocate_served(size, alignment, false)?;
        Ok(DeviceBuffer::new(self.clone(), served.address, size, served.serial))
    }

    /// Allocates a block that frees itself. As [`Pool::allocate_contiguous`].
    ///
    /// # Errors
    /// As [`Pool::allocate_contiguous`].
    pub fn allocate_buffer_contiguous(&self, size: u64, alignment: u64) -> Result<DeviceBuffer> {
        let served = self.allocate_served(size, alignment, true)?;
        Ok(DeviceBuffer::new(self.clone(), served.address, size, served.serial))
    }

    /// Frees the block that begins at `address`. [`DevicePtr::NULL`] is the block of zero bytes: freeing it does nothing.
    ///
    /// # Safety
    /// No queued or running work touches the block, nothing uses it from now on, and no [`DeviceBuffer`] owns it. The
    /// pool gives the memory to the next request that it fits, on any stream.
    ///
    /// # Errors
    /// [`Error::is_invalid_argument`], with [`Error::invalid_free_reason`], for an address that is not the start of a
    /// live block of this pool. Nothing is changed then.
    ///
    /// # Complexity
    /// O(log n) of the memory held. No driver call.
    #[allow(unsafe_code)]
    pub unsafe fn deallocate(&self, address: DevicePtr) -> Result<()> {
        self.free(address)
    }

    /// [`Pool::deallocate`] for the layers outside, which queue no work.
    pub(crate) fn free(&self, address: DevicePtr) -> Result<()> {
        if address.is_null() { Ok(()) } else { self.shared.free(address, None) }
    }

    /// Gives free memory back to the driver until at most `to` bytes are held, or nothing held is wholly free. Returns
    /// the bytes held then.
    ///
    /// # Errors
    /// [`Error::is_driver`]: the driver would not take something back. The pool keeps it and tries again at the next
    /// trim. A driver that has ended, or whose context was destroyed, has taken its memory along: that is no error.
    ///
    /// # Complexity
    /// O(handles held), and two driver calls for each handle given back.
    pub fn trim(&self, to: u64) -> Result<u64> {
        self.shared.trim(to)
    }

    /// The pool's counts, all from one moment. Where the driver has ended, at process exit and in a forked child, there is
    /// no memory to count: all of them are zero.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.shared.statistics()
    }

    /// The device that the memory lies on.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.shared.site.device
    }

    /// The kind of memory.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.shared.site.kind
    }

    /// What the pool's memory is made for, and so what it can be used for: what was asked for with
    /// [`PoolBuilder::rdma`] and [`PoolBuilder::shareable`], which are refused where they cannot be had. `None` where the
    /// memory comes in plain allocations.
    #[must_use]
    pub fn handle_properties(&self) -> Option<HandleProperties> {
        self.shared.site.maps_pages.then_some(self.shared.site.handle_properties)
    }

    /// The pool's options in the form that [`PoolBuilder::configure`] and the variable `VRAMPOOL_CONFIG` are read in,
    /// without those that are as by default.
    #[must_use]
    pub fn config(&self) -> String {
        self.shared.options.to_string()
    }

    /// The pool's page in bytes: what it takes from the driver is a multiple of it.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.shared.site.page_bytes
    }

    /// Checks the invariants of every layer: for tests, and for whoever suspects the pool. Where the driver has ended,
    /// nothing is left to check.
    ///
    /// # Errors
    /// The first violation found, in words.
    ///
    /// # Complexity
    /// O(n) of the memory held, under the pool's lock.
    pub fn check(&self) -> Result<(), String> {
        if self.shared.has_ended() { Ok(()) } else { self.shared.core.lock().check() }
    }
}

//! What is measured: allocators behind one face.

use crate::Failure;
use mimalloc::MiMalloc;
use std::alloc::{GlobalAlloc, Layout};
use vrampool::driver::{DriverResult, MemoryKind, StreamFlags, StreamHandle};
use vrampool::error::CuResult;
use vrampool::units::{Bytes, DevicePtr, MIN_ALIGNMENT};
use vrampool::{Device, Pool};

/// Why an allocation was not made.
pub(crate) enum Refusal {
    /// There is not that much memory: the row is left out.
    Memory(String),
    /// Anything else: the benchmark ends.
    Failed(Failure),
}

/// An allocator. Addresses are those of its own memory, the device's or the host's.
pub(crate) trait Subject: Sync {
    fn allocate(&self, size: u64) -> Result<u64, Refusal>;

    /// Frees a block that [`Subject::allocate`] gave for this size and that was not freed since.
    fn free(&self, address: u64, size: u64) -> Result<(), Failure>;

    /// The time that a model says all calls so far have taken; `None` where they take real time.
    fn modelled_ns(&self) -> Option<u64> {
        None
    }
}

/// The driver's own functions: what a program does without a pool.
pub(crate) struct Plain<'a> {
    pub(crate) device: &'a Device,
    pub(crate) kind: MemoryKind,
}

impl Subject for Plain<'_> {
    fn allocate(&self, size: u64) -> Result<u64, Refusal> {
        driver_allocated(self.device.driver().mem_alloc(self.device.id(), self.kind, size), size)
    }

    fn free(&self, address: u64, size: u64) -> Result<(), Failure> {
        driver_freed(self.device.driver().mem_free(self.device.id(), self.kind, DevicePtr::new(address)), size)
    }

    fn modelled_ns(&self) -> Option<u64> {
        self.device.driver().modelled_ns()
    }
}

/// The driver's own stream-ordered allocator, on a stream. It keeps what is freed, as those who use it have it do; by
/// default the driver gives memory back whenever anything is synchronised.
pub(crate) struct Ordered<'a> {
    device: &'a Device,
    stream: StreamHandle,
}

impl<'a> Ordered<'a> {
    pub(crate) fn new(device: &'a Device) -> Result<Self, Failure> {
        let driver = device.driver();
        let failed = |code| Failure::Work(format!("the driver's stream-ordered allocator failed with {code}"));
        driver.mem_pool_threshold(device.id(), u64::MAX).map_err(failed)?;
        Ok(Self { device, stream: driver.stream_create(device.id(), StreamFlags::NonBlocking).map_err(failed)? })
    }
}

impl Subject for Ordered<'_> {
    fn allocate(&self, size: u64) -> Result<u64, Refusal> {
        driver_allocated(self.device.driver().mem_alloc_async(self.device.id(), size, self.stream), size)
    }

    fn free(&self, address: u64, size: u64) -> Result<(), Failure> {
        driver_freed(self.device.driver().mem_free_async(self.device.id(), DevicePtr::new(address), self.stream), size)
    }

    fn modelled_ns(&self) -> Option<u64> {
        self.device.driver().modelled_ns()
    }
}

impl Drop for Ordered<'_> {
    fn drop(&mut self) {
        let driver = self.device.driver();
        // What was kept goes back. A failure shows in the rows that come next.
        _ = driver.mem_pool_threshold(self.device.id(), 0);
        _ = driver.stream_synchronize(self.device.id(), self.stream);
        _ = driver.stream_destroy(self.stream);
    }
}

fn driver_allocated(result: DriverResult<DevicePtr>, size: u64) -> Result<u64, Refusal> {
    match result {
        Ok(address) => Ok(address.address()),
        Err(code) if code == CuResult::ERROR_OUT_OF_MEMORY => {
            Err(Refusal::Memory(format!("the driver has no {} more ({code})", Bytes(size))))
        }
        Err(code) => Err(Refusal::Failed(Failure::Work(format!("the driver's allocation of {} failed with {code}", Bytes(size))))),
    }
}

fn driver_freed(result: DriverResult<()>, size: u64) -> Result<(), Failure> {
    result.map_err(|code| Failure::Work(format!("the driver's free of {} failed with {code}", Bytes(size))))
}

impl Subject for Pool {
    fn allocate(&self, size: u64) -> Result<u64, Refusal> {
        match Pool::allocate(self, size) {
            Ok(address) => Ok(address.address()),
            // A size that no pool could serve is one of memory that cannot be had.
            Err(error) if error.is_out_of_memory() || error.is_invalid_argument() => Err(Refusal::Memory(error.to_string())),
            Err(error) => Err(Refusal::Failed(error.into())),
        }
    }

    fn free(&self, address: u64, _size: u64) -> Result<(), Failure> {
        // SAFETY: no work is queued by this program, and the works free a block once and forget it.
        Ok(unsafe { self.deallocate(DevicePtr::new(address)) }?)
    }
}

/// mimalloc in host memory, at the same alignment.
pub(crate) struct Host;

impl Host {
    fn layout(size: u64) -> Option<Layout> {
        // Without bytes there is no layout that `GlobalAlloc` takes.
        let size = usize::try_from(size).ok().filter(|&size| size > 0)?;
        Layout::from_size_align(size, MIN_ALIGNMENT as usize).ok()
    }
}

impl Subject for Host {
    fn allocate(&self, size: u64) -> Result<u64, Refusal> {
        let none = || Refusal::Memory(format!("the host has no {} more", Bytes(size)));
        let layout = Self::layout(size).ok_or_else(none)?;
        // SAFETY: the layout has bytes, which is all that `GlobalAlloc::alloc` asks.
        let address = unsafe { MiMalloc.alloc(layout) };
        if address.is_null() { Err(none()) } else { Ok(address.expose_provenance() as u64) }
    }

    fn free(&self, address: u64, size: u64) -> Result<(), Failure> {
        let unknown = || Failure::Work(format!("mimalloc never allocated {} at {address:#x}", Bytes(size)));
        let layout = Self::layout(size).ok_or_else(unknown)?;
        let address = usize::try_from(address).map_err(|_| unknown())?;
        // SAFETY: the works free each block once, with the size that `allocate` made the same layout of; the address is
        // one whose provenance `allocate` exposed.
        unsafe { MiMalloc.dealloc(std::ptr::with_exposed_provenance_mut(address), layout) };
        Ok(())
    }
}

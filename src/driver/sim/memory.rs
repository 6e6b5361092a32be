//! Plain allocations, each device's memory, and what work may touch.

use super::config::PlainPlacement;
use super::space::Space;
use super::{State, cost};
use crate::driver::{DriverResult, MemoryKind};
use crate::error::CuResult;
use crate::units::{DeviceId, DevicePtr, MIB, checked_align_up};
use std::collections::BTreeMap;

/// Where plain allocations lie: the uppermost TiB below 2^47.
pub(super) const PLAIN_START: u64 = 0x7f00_0000_0000;
pub(super) const PLAIN_BYTES: u64 = 0xff_ffff_0000;

/// One device's memory and context.
#[derive(Debug, Default)]
pub(super) struct Device {
    /// Physical bytes held by this process.
    pub(super) held_bytes: u64,
    pub(super) peak_bytes: u64,
    /// The code that every call on the context returns from now on.
    pub(super) sticky: Option<CuResult>,
}

#[derive(Debug)]
pub(super) struct Plain {
    pub(super) space: Space,
    pub(super) allocations: BTreeMap<u64, PlainAllocation>,
    /// Addresses in use, with what is lost between allocations.
    pub(super) address_bytes: u64,
    /// Bytes of pinned and managed memory.
    pub(super) host_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PlainAllocation {
    pub(super) bytes: u64,
    /// The addresses taken for it, from its start on.
    span_bytes: u64,
    pub(super) kind: MemoryKind,
    pub(super) device: usize,
    /// Where it was allocated in the order of a stream: how far that is.
    pub(super) ordered: Option<Phase>,
}

/// How far an allocation in the order of a stream is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Its stream has yet to come to it.
    Coming,
    There,
    /// Its free is queued.
    Going,
}

impl Plain {
    pub(super) fn new((start, bytes): (u64, u64)) -> Self {
        Self { space: Space::new(start, bytes), allocations: BTreeMap::new(), address_bytes: 0, host_bytes: 0 }
    }
}

/// A range that a piece of work reads or writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    pub(super) start: u64,
    pub(super) bytes: u64,
    pub(super) writes: bool,
}

impl Touch {
    pub(super) fn read(start: DevicePtr, bytes: u64) -> Self {
        Self { start: start.address(), bytes, writes: false }
    }

    pub(super) fn write(start: DevicePtr, bytes: u64) -> Self {
        Self { start: start.address(), bytes, writes: true }
    }

    pub(super) fn overlaps(self, start: u64, bytes: u64) -> bool {
        self.start < start.saturating_add(bytes) && start < self.start.saturating_add(self.bytes)
    }
}

impl State {
    /// The index of a device whose context is sound.
    pub(super) fn device(&self, device: DeviceId) -> DriverResult<usize> {
        let index = device.0 as usize;
        let state = self.devices.get(index).ok_or(CuResult::ERROR_INVALID_DEVICE)?;
        match state.sticky {
            Some(code) => Err(code),
            None => Ok(index),
        }
    }

    pub(super) fn sound(&self, device: usize) -> DriverResult<()> {
        self.devices[device].sticky.map_or(Ok(()), Err)
    }

    /// Takes physical memory of a device.
    pub(super) fn charge(&mut self, device: usize, bytes: u64) -> DriverResult<()> {
        let config = &self.config.devices[device];
        let limit = config.properties.total_bytes.saturating_sub(config.other_process_bytes);
        let state = &mut self.devices[device];
        let held = state.held_bytes.checked_add(bytes).filter(|&held| held <= limit).ok_or(CuResult::ERROR_OUT_OF_MEMORY)?;
        state.held_bytes = held;
        state.peak_bytes = state.peak_bytes.max(held);
        Ok(())
    }

    pub(super) fn discharge(&mut self, device: usize, bytes: u64) {
        self.devices[device].held_bytes -= bytes;
    }

    /// Whether `bytes` more bytes of addresses are within the limit.
    pub(super) fn addresses_left(&self, bytes: u64) -> bool {
        let used = self.plain.address_bytes + self.vmm.reserved_bytes;
        used.checked_add(bytes).is_some_and(|sum| sum <= self.config.address_space_bytes)
    }

    pub(super) fn mem_alloc(&mut self, device: DeviceId, kind: MemoryKind, bytes: u64) -> DriverResult<(DevicePtr, u64)> {
        let device = self.device(device)?;
        if bytes == 0 && kind == MemoryKind::Pinned {
            return Ok((DevicePtr::NULL, 0));
        }
        let address = self.place(device, kind, bytes, None)?;
        Ok((address, cost::of(if kind == MemoryKind::Pinned { cost::MEM_ALLOC_HOST } else { cost::MEM_ALLOC }, bytes)))
    }

    /// Finds a place for an allocation, and charges for it.
    pub(super) fn place(&mut self, device: usize, kind: MemoryKind, bytes: u64, ordered: Option<Phase>) -> DriverResult<DevicePtr> {
        if bytes == 0 {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        if kind == MemoryKind::Managed && !self.config.devices[device].properties.managed_memory {
            return Err(CuResult::ERROR_NOT_SUPPORTED);
        }
        let (alignment, phase, gap) = match self.config.placement {
            PlainPlacement::Driver if bytes >= MIB => (2 * MIB, 0, 0),
            PlainPlacement::Driver => (512, 0, 0),
            PlainPlacement::Adjacent => (256, 0, 0),
            PlainPlacement::Odd => (512, 256, 256),
        };
        let rounding = if phase == 0 { alignment } else { 256 };
        let span_bytes = checked_align_up(bytes, rounding).and_then(|span| span.checked_add(gap)).ok_or(CuResult::ERROR_OUT_OF_MEMORY)?;
        if !self.addresses_left(span_bytes) {
            return Err(CuResult::ERROR_OUT_OF_MEMORY);
        }
        match kind {
            MemoryKind::Device => self.charge(device, bytes)?,
            MemoryKind::Pinned | MemoryKind::Managed => {
                let held = self.plain.host_bytes.checked_add(bytes).filter(|&held| held <= self.config.host_bytes);
                self.plain.host_bytes = held.ok_or(CuResult::ERROR_OUT_OF_MEMORY)?;
            }
        }
        let Some(address) = self.plain.space.take(span_bytes, alignment, phase) else {
            self.uncharge(device, kind, bytes);
            return Err(CuResult::ERROR_OUT_OF_MEMORY);
        };
        if self.backing.as_mut().is_some_and(|backing| !backing.plain_alloc(address, bytes)) {
            self.plain.space.give(address, span_bytes);
            self.uncharge(device, kind, bytes);
            return Err(CuResult::ERROR_OUT_OF_MEMORY);
        }
        self.plain.address_bytes += span_bytes;
        self.plain.allocations.insert(address, PlainAllocation { bytes, span_bytes, kind, device, ordered });
        Ok(DevicePtr::new(address))
    }

    fn uncharge(&mut self, device: usize, kind: MemoryKind, bytes: u64) {
        match kind {
            MemoryKind::Device => self.discharge(device, bytes),
            MemoryKind::Pinned | MemoryKind::Managed => self.plain.host_bytes -= bytes,
        }
    }

    /// Whether an address can be freed as memory of this kind.
    pub(super) fn freeable(&self, device: DeviceId, kind: MemoryKind, address: DevicePtr) -> DriverResult<PlainAllocation> {
        let device = self.device(device)?;
        let found = self.plain.allocations.get(&address.address());
        let is_right = |found: &&PlainAllocation| found.kind == kind && found.device == device && found.ordered.is_none();
        found.filter(is_right).copied().ok_or(CuResult::ERROR_INVALID_VALUE)
    }

    pub(super) fn mem_free(&mut self, device: DeviceId, kind: MemoryKind, address: DevicePtr) -> DriverResult<u64> {
        let bytes = self.freeable(device, kind, address)?.bytes;
        self.forget_plain(address);
        Ok(cost::of(if kind == MemoryKind::Pinned { cost::MEM_FREE_HOST } else { cost::MEM_FREE }, bytes))
    }

    /// Gives an allocation's memory and addresses back.
    pub(super) fn forget_plain(&mut self, address: DevicePtr) {
        let Some(PlainAllocation { bytes, span_bytes, kind, device, .. }) = self.plain.allocations.remove(&address.address()) else {
            return;
        };
        self.uncharge(device, kind, bytes);
        self.plain.address_bytes -= span_bytes;
        if let Some(backing) = &mut self.backing {
            backing.plain_free(address.address());
        }
        if self.config.reuse_addresses {
            self.plain.space.give(address.address(), span_bytes);
        }
    }

    /// Whether an address is memory of any kind.
    pub(super) fn is_memory(&self, address: u64) -> bool {
        let plain = self.plain.allocations.range(..=address).next_back();
        plain.is_some_and(|(&start, plain)| address < start + plain.bytes) || self.vmm.mapping_at(address).is_some()
    }

    /// Whether work of `device` may touch a range. A copy may reach a plain allocation of any device (the driver stages
    /// it where it must); a kernel only those of its own and of the host.
    pub(super) fn touchable(&self, device: usize, touch: Touch, is_copy: bool) -> bool {
        let Some(end) = touch.start.checked_add(touch.bytes) else { return false };
        if touch.bytes == 0 {
            return true;
        }
        if let Some((&start, plain)) = self.plain.allocations.range(..=touch.start).next_back()
            && touch.start < start + plain.bytes
        {
            let reachable = plain.kind != MemoryKind::Device || plain.device == device || is_copy;
            return reachable && end <= start + plain.bytes;
        }
        let mut at = touch.start;
        while at < end {
            let Some((start, mapping)) = self.vmm.mapping_at(at) else { return false };
            let mask = if touch.writes { mapping.writable } else { mapping.readable };
            if mask & (1 << device) == 0 {
                return false;
            }
            at = start + mapping.bytes;
        }
        true
    }
}

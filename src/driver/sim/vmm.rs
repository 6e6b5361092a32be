//! Address ranges, physical handles and mappings.

use super::space::{Space, Table};
use super::{State, cost};
use crate::driver::{AccessDescriptor, AccessFlags, DriverResult, Granularity, HandleProperties, PhysicalHandle};
use crate::error::CuResult;
use crate::units::DevicePtr;
use std::collections::BTreeMap;

/// Where reservations lie, below the plain allocations.
const RESERVE_START: u64 = 0x0100_0000_0000;
const RESERVE_END: u64 = super::memory::PLAIN_START;

#[derive(Debug)]
pub(super) struct Vmm {
    space: Space,
    /// Reservations, start to length.
    pub(super) reservations: BTreeMap<u64, u64>,
    pub(super) reserved_bytes: u64,
    /// Mappings by start.
    pub(super) mappings: BTreeMap<u64, Mapping>,
    /// Physical memory: live handles, and released ones that are still mapped.
    pub(super) handles: Table<Physical>,
    pub(super) physical_count: u64,
}

#[derive(Debug)]
pub(super) struct Physical {
    pub(super) bytes: u64,
    pub(super) device: usize,
    mappings: u64,
    pub(super) released: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Mapping {
    pub(super) bytes: u64,
    pub(super) handle: u64,
    /// Devices that may read, a bit each.
    pub(super) readable: u32,
    /// Devices that may write, a bit each.
    pub(super) writable: u32,
}

impl Vmm {
    pub(super) fn new(reuse_handles: bool) -> Self {
        Self {
            space: Space::new(RESERVE_START, RESERVE_END - RESERVE_START),
            reservations: BTreeMap::new(),
            reserved_bytes: 0,
            mappings: BTreeMap::new(),
            handles: Table::new(0x5500_0000_1000, reuse_handles),
            physical_count: 0,
        }
    }

    /// The mapping that an address lies in.
    pub(super) fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address < start + mapping.bytes).then_some((start, mapping))
    }

    /// Whether anything is mapped in a range.
    fn any_mapped(&self, start: u64, bytes: u64) -> bool {
        self.mapping_at(start).is_some() || self.mappings.range(start..start + bytes).next().is_some()
    }

    /// The neighbouring whole mappings that make up a range exactly.
    fn whole_mappings(&self, start: u64, bytes: u64) -> DriverResult<Vec<u64>> {
        let end = start.checked_add(bytes).ok_or(CuResult::ERROR_INVALID_VALUE)?;
        let mut starts = Vec::new();
        let mut at = start;
        while at < end {
            let mapping = self.mappings.get(&at).ok_or(CuResult::ERROR_INVALID_VALUE)?;
            starts.push(at);
            at += mapping.bytes;
        }
        if at == end && !starts.is_empty() { Ok(starts) } else { Err(CuResult::ERROR_INVALID_VALUE) }
    }

    /// Drops physical memory that has neither handle nor mapping; gives its bytes and device.
    fn drop_unused(&mut self, handle: u64) -> Option<(u64, usize)> {
        self.handles.get(handle).filter(|physical| physical.released && physical.mappings == 0)?;
        let physical = self.handles.remove(handle)?;
        self.physical_count -= 1;
        Some((physical.bytes, physical.device))
    }
}

impl State {
    /// The granularity that addresses are held to: the coarsest of the devices that map memory.
    fn address_granularity(&self) -> DriverResult<u64> {
        let with = self.config.devices.iter().filter(|device| device.properties.virtual_memory_management);
        with.map(|device| device.granularity.minimum_bytes).max().ok_or(CuResult::ERROR_NOT_SUPPORTED)
    }

    pub(super) fn mem_granularity(&self, properties: &HandleProperties) -> DriverResult<Granularity> {
        let device = &self.config.devices[self.device(properties.device)?];
        if device.properties.virtual_memory_management { Ok(device.granularity) } else { Err(CuResult::ERROR_NOT_SUPPORTED) }
    }

    pub(super) fn mem_address_reserve(&mut self, bytes: u64, alignment: u64) -> DriverResult<(DevicePtr, u64)> {
        let granularity = self.address_granularity()?;
        if bytes == 0 || !bytes.is_multiple_of(granularity) || (alignment != 0 && !alignment.is_power_of_two()) {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        if !self.addresses_left(bytes) {
            return Err(CuResult::ERROR_OUT_OF_MEMORY);
        }
        let start = self.vmm.space.take(bytes, alignment.max(granularity), 0).ok_or(CuResult::ERROR_OUT_OF_MEMORY)?;
        self.vmm.reservations.insert(start, bytes);
        self.vmm.reserved_bytes += bytes;
        Ok((DevicePtr::new(start), cost::of(cost::MEM_ADDRESS_RESERVE, bytes)))
    }

    pub(super) fn mem_address_free(&mut self, address: DevicePtr, bytes: u64) -> DriverResult<u64> {
        self.address_granularity()?;
        let start = address.address();
        if self.vmm.reservations.get(&start) != Some(&bytes) || self.vmm.any_mapped(start, bytes) {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        self.vmm.reservations.remove(&start);
        self.vmm.reserved_bytes -= bytes;
        if self.config.reuse_addresses {
            self.vmm.space.give(start, bytes);
        }
        Ok(cost::of(cost::MEM_ADDRESS_FREE, bytes))
    }

    pub(super) fn mem_create(&mut self, bytes: u64, properties: &HandleProperties) -> DriverResult<(PhysicalHandle, u64)> {
        let granularity = self.mem_granularity(properties)?.minimum_bytes;
        let device = properties.device.0 as usize;
        if bytes == 0 || !bytes.is_multiple_of(granularity) {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        if self.vmm.physical_count >= self.config.handle_limit {
            return Err(CuResult::ERROR_OUT_OF_MEMORY);
        }
        self.charge(device, bytes)?;
        self.vmm.physical_count += 1;
        let handle = self.vmm.handles.insert(Physical { bytes, device, mappings: 0, released: false });
        Ok((PhysicalHandle(handle), cost::of(cost::MEM_CREATE, bytes)))
    }

    fn live_handle(&self, handle: PhysicalHandle) -> DriverResult<&Physical> {
        let physical = self.vmm.handles.get(handle.0).filter(|physical| !physical.released).ok_or(CuResult::ERROR_INVALID_VALUE)?;
        self.sound(physical.device)?;
        Ok(physical)
    }

    pub(super) fn mem_release(&mut self, handle: PhysicalHandle) -> DriverResult<u64> {
        let bytes = self.live_handle(handle)?.bytes;
        if let Some(physical) = self.vmm.handles.get_mut(handle.0) {
            physical.released = true;
        }
        self.give_back_if_unused(handle.0);
        Ok(cost::of(cost::MEM_RELEASE, bytes))
    }

    fn give_back_if_unused(&mut self, handle: u64) {
        if let Some((bytes, device)) = self.vmm.drop_unused(handle) {
            self.discharge(device, bytes);
        }
    }

    pub(super) fn mem_map(&mut self, address: DevicePtr, bytes: u64, offset: u64, handle: PhysicalHandle) -> DriverResult<u64> {
        let granularity = self.address_granularity()?;
        let physical = self.live_handle(handle)?;
        if offset != 0 {
            return Err(CuResult::ERROR_NOT_SUPPORTED);
        }
        let start = address.address();
        let end = start.checked_add(bytes).ok_or(CuResult::ERROR_INVALID_VALUE)?;
        let reservation = self.vmm.reservations.range(..=start).next_back();
        let inside = reservation.is_some_and(|(&from, &length)| end <= from + length);
        if bytes != physical.bytes || !start.is_multiple_of(granularity) || !inside || self.vmm.any_mapped(start, bytes) {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        self.vmm.mappings.insert(start, Mapping { bytes, handle: handle.0, readable: 0, writable: 0 });
        if let Some(physical) = self.vmm.handles.get_mut(handle.0) {
            physical.mappings += 1;
        }
        Ok(cost::of(cost::MEM_MAP, bytes))
    }

    pub(super) fn mem_unmap(&mut self, address: DevicePtr, bytes: u64) -> DriverResult<u64> {
        self.address_granularity()?;
        let starts = self.vmm.whole_mappings(address.address(), bytes)?;
        if starts.len() > 1 && !self.config.multi_unmap {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        self.devices_of(&starts)?;
        self.refuse_in_use("cuMemUnmap", address.address(), bytes);
        let mut ns = 0;
        for start in starts {
            let Some(mapping) = self.vmm.mappings.remove(&start) else { continue };
            ns += cost::of(cost::MEM_UNMAP, mapping.bytes);
            if let Some(physical) = self.vmm.handles.get_mut(mapping.handle) {
                physical.mappings -= 1;
            }
            self.give_back_if_unused(mapping.handle);
        }
        Ok(ns)
    }

    /// Whether the contexts that mappings belong to are sound.
    fn devices_of(&self, starts: &[u64]) -> DriverResult<()> {
        for start in starts {
            if let Some(physical) = self.vmm.mappings.get(start).and_then(|mapping| self.vmm.handles.get(mapping.handle)) {
                self.sound(physical.device)?;
            }
        }
        Ok(())
    }

    pub(super) fn mem_set_access(&mut self, address: DevicePtr, bytes: u64, access: &[AccessDescriptor]) -> DriverResult<u64> {
        self.address_granularity()?;
        if access.is_empty() {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        let starts = self.vmm.whole_mappings(address.address(), bytes)?;
        self.devices_of(&starts)?;
        for descriptor in access {
            let user = self.device(descriptor.device)?;
            let reachable = |start: &u64| {
                let owner = self.vmm.mappings.get(start).and_then(|mapping| self.vmm.handles.get(mapping.handle));
                owner.is_some_and(|owner| owner.device == user || self.config.can_access_peer(user, owner.device))
            };
            if !starts.iter().all(reachable) {
                return Err(CuResult::ERROR_INVALID_DEVICE);
            }
        }
        let mut ns = 0;
        for start in &starts {
            let Some(mapping) = self.vmm.mappings.get_mut(start) else { continue };
            for descriptor in access {
                let bit = 1 << descriptor.device.0;
                let (reads, writes) = match descriptor.flags {
                    AccessFlags::None => (false, false),
                    AccessFlags::Read => (true, false),
                    AccessFlags::ReadWrite => (true, true),
                };
                mapping.readable = mapping.readable & !bit | if reads { bit } else { 0 };
                mapping.writable = mapping.writable & !bit | if writes { bit } else { 0 };
            }
            let one = cost::of(cost::MEM_SET_ACCESS, mapping.bytes);
            ns += if starts.len() > 1 { one.max(cost::MEM_SET_ACCESS_OF_SEVERAL) } else { one };
        }
        Ok(ns)
    }
}

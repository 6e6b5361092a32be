//! Address ranges, physical handles and mappings.

use super::space::{Space, Table};
use super::{State, cost, undefined};
use crate::driver::{AccessDescriptor, AccessFlags, DriverResult, Granularity, HandleProperties, HandleTypes, PhysicalHandle};
use crate::error::CuResult;
use crate::units::DevicePtr;
use std::collections::BTreeMap;

/// Where reservations lie, below the plain allocations.
const RESERVE_START: u64 = 0x0100_0000_0000;
const RESERVE_END: u64 = super::memory::PLAIN_START;
/// `CU_MEM_HANDLE_TYPE_WIN32` and `CU_MEM_HANDLE_TYPE_WIN32_KMT`.
const WINDOWS_HANDLES: u32 = 2 | 4;

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
    pub(super) properties: HandleProperties,
    mappings: u64,
    pub(super) released: bool,
    /// Where it lies in the memory file of a backed device.
    offset: u64,
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

    /// The mappings in a range, which may have holes, but whose ends lie in no mapping and which lies in one reservation.
    fn uncut_mappings(&self, start: u64, bytes: u64) -> DriverResult<Vec<u64>> {
        let end = start.checked_add(bytes).ok_or(CuResult::ERROR_INVALID_VALUE)?;
        let reservation = self.reservations.range(..=start).next_back();
        let inside = reservation.is_some_and(|(&from, &length)| end <= from + length);
        let cut = |at: u64| self.mapping_at(at).is_some_and(|(from, _)| from < at);
        if !inside || cut(start) || cut(end) {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        Ok(self.mappings.range(start..end).map(|(&at, _)| at).collect())
    }

    /// Takes out physical memory that has neither handle nor mapping.
    fn take_unused(&mut self, handle: u64) -> Option<Physical> {
        self.handles.get(handle).filter(|physical| physical.released && physical.mappings == 0)?;
        self.physical_count -= 1;
        self.handles.remove(handle)
    }
}

impl State {
    /// The granularity that addresses are held to: the coarsest of the devices that map memory.
    fn address_granularity(&self) -> DriverResult<u64> {
        let with = self.config.devices.iter().filter(|device| device.properties.virtual_memory_management);
        with.map(|device| device.granularity.minimum_bytes).max().ok_or(CuResult::ERROR_NOT_SUPPORTED)
    }

    /// Refuses to make memory for what the device cannot, or this process may not. Windows' handle types are not this
    /// system's; bits that the driver does not know it passes over.
    fn refuse_handle(&self, properties: &HandleProperties) -> DriverResult<()> {
        let HandleProperties { device, rdma, shareable } = *properties;
        let device = &self.config.devices.get(device.0 as usize).ok_or(CuResult::ERROR_INVALID_DEVICE)?.properties;
        let lacks = |kind| shareable.contains(kind) && !device.shareable.contains(kind);
        if shareable.bits() & WINDOWS_HANDLES != 0 {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        if (rdma && !device.rdma) || lacks(HandleTypes::FILE_DESCRIPTOR) || lacks(HandleTypes::FABRIC) {
            return Err(CuResult::ERROR_NOT_SUPPORTED);
        }
        if shareable.contains(HandleTypes::FABRIC) && !self.config.fabric_permitted {
            return Err(CuResult::ERROR_NOT_PERMITTED);
        }
        Ok(())
    }

    /// The same whatever the memory is made for.
    pub(super) fn mem_granularity(&self, properties: &HandleProperties) -> DriverResult<Granularity> {
        let device = self.config.devices.get(properties.device.0 as usize).ok_or(CuResult::ERROR_INVALID_DEVICE)?;
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
        let alignment = alignment.max(granularity);
        let start = match &mut self.backing {
            Some(backing) => backing.reserve(bytes, alignment),
            None => self.vmm.space.take(bytes, alignment, 0),
        };
        let start = start.ok_or(CuResult::ERROR_OUT_OF_MEMORY)?;
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
        match &mut self.backing {
            Some(backing) => backing.unreserve(start),
            None if self.config.reuse_addresses => self.vmm.space.give(start, bytes),
            None => {}
        }
        Ok(cost::of(cost::MEM_ADDRESS_FREE, bytes))
    }

    pub(super) fn mem_create(&mut self, bytes: u64, properties: &HandleProperties) -> DriverResult<(PhysicalHandle, u64)> {
        let granularity = self.mem_granularity(properties)?.minimum_bytes;
        let device = properties.device.0 as usize;
        if bytes == 0 || !bytes.is_multiple_of(granularity) {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        self.refuse_handle(properties)?;
        if self.vmm.physical_count >= self.config.handle_limit {
            return Err(CuResult::ERROR_OUT_OF_MEMORY);
        }
        self.charge(device, bytes)?;
        let Some(offset) = self.backing.as_mut().map_or(Some(0), |backing| backing.create(device, bytes)) else {
            self.discharge(device, bytes);
            return Err(CuResult::ERROR_OUT_OF_MEMORY);
        };
        self.vmm.physical_count += 1;
        let handle = self.vmm.handles.insert(Physical { bytes, device, properties: *properties, mappings: 0, released: false, offset });
        Ok((PhysicalHandle(handle), cost::of(cost::MEM_CREATE, bytes)))
    }

    pub(super) fn mem_release(&mut self, handle: PhysicalHandle) -> DriverResult<u64> {
        if handle.0 != 0 && !self.vmm.handles.was_issued(handle.0) {
            undefined(format_args!("cuMemRelease of {handle:?}, which cuMemCreate never returned"));
        }
        let physical = self.vmm.handles.get_mut(handle.0).filter(|physical| !physical.released);
        let physical = physical.ok_or(CuResult::ERROR_INVALID_VALUE)?;
        physical.released = true;
        let bytes = physical.bytes;
        self.give_back_if_unused(handle.0);
        Ok(cost::of(cost::MEM_RELEASE, bytes))
    }

    fn give_back_if_unused(&mut self, handle: u64) {
        if let Some(Physical { bytes, device, offset, .. }) = self.vmm.take_unused(handle) {
            self.discharge(device, bytes);
            if let Some(backing) = &mut self.backing {
                backing.destroy(device, offset, bytes);
            }
        }
    }

    pub(super) fn mem_map(&mut self, address: DevicePtr, bytes: u64, offset: u64, handle: PhysicalHandle) -> DriverResult<u64> {
        let granularity = self.address_granularity()?;
        if handle.0 == 0 || bytes == 0 {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        let Some(physical) = self.vmm.handles.get(handle.0).filter(|physical| !physical.released) else {
            undefined(format_args!("cuMemMap of {handle:?}, which is not live"));
        };
        if offset != 0 || bytes != physical.bytes {
            return Err(CuResult::ERROR_NOT_SUPPORTED);
        }
        let start = address.address();
        let end = start.checked_add(bytes).ok_or(CuResult::ERROR_INVALID_VALUE)?;
        let reservation = self.vmm.reservations.range(..=start).next_back();
        let inside = reservation.is_some_and(|(&from, &length)| end <= from + length);
        if !start.is_multiple_of(granularity) || !inside || self.vmm.any_mapped(start, bytes) {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        if self.backing.as_mut().is_some_and(|backing| !backing.map(start, bytes, physical.device, physical.offset)) {
            return Err(CuResult::ERROR_OUT_OF_MEMORY);
        }
        self.vmm.mappings.insert(start, Mapping { bytes, handle: handle.0, readable: 0, writable: 0 });
        if let Some(physical) = self.vmm.handles.get_mut(handle.0) {
            physical.mappings += 1;
        }
        Ok(cost::of(cost::MEM_MAP, bytes))
    }

    pub(super) fn mem_unmap(&mut self, address: DevicePtr, bytes: u64) -> DriverResult<u64> {
        let granularity = self.address_granularity()?;
        let start = address.address();
        if bytes == 0 || !bytes.is_multiple_of(granularity) || !start.is_multiple_of(granularity) {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        let starts =
            if self.config.multi_unmap { self.vmm.uncut_mappings(start, bytes)? } else { self.vmm.whole_mappings(start, bytes)? };
        if starts.len() > 1 && !self.config.multi_unmap {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        self.refuse_in_use("cuMemUnmap", start, bytes);
        let mut ns = 0;
        for start in starts {
            let Some(mapping) = self.vmm.mappings.remove(&start) else { continue };
            if self.backing.as_mut().is_some_and(|backing| !backing.unmap(start, mapping.bytes)) {
                self.vmm.mappings.insert(start, mapping);
                return Err(CuResult::ERROR_OPERATING_SYSTEM);
            }
            ns += cost::of(cost::MEM_UNMAP, mapping.bytes);
            if let Some(physical) = self.vmm.handles.get_mut(mapping.handle) {
                physical.mappings -= 1;
            }
            self.give_back_if_unused(mapping.handle);
        }
        Ok(ns)
    }

    pub(super) fn mem_set_access(&mut self, address: DevicePtr, bytes: u64, access: &[AccessDescriptor]) -> DriverResult<u64> {
        self.address_granularity()?;
        if access.is_empty() {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        let starts = self.vmm.whole_mappings(address.address(), bytes)?;
        for descriptor in access {
            let user = descriptor.device.0 as usize;
            if user >= self.devices.len() {
                return Err(CuResult::ERROR_INVALID_VALUE);
            }
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
            let (mut readable, mut writable) = (mapping.readable, mapping.writable);
            for descriptor in access {
                let bit = 1 << descriptor.device.0;
                let (reads, writes) = match descriptor.flags {
                    AccessFlags::None => (0, 0),
                    AccessFlags::Read => (bit, 0),
                    AccessFlags::ReadWrite => (bit, bit),
                };
                readable = readable & !bit | reads;
                writable = writable & !bit | writes;
            }
            if let Some(backing) = &mut self.backing
                && !backing.protect(*start, mapping.bytes, readable != 0, writable != 0)
            {
                return Err(CuResult::ERROR_OUT_OF_MEMORY);
            }
            (mapping.readable, mapping.writable) = (readable, writable);
            let one = cost::of(cost::MEM_SET_ACCESS, mapping.bytes);
            ns += if starts.len() > 1 { one.max(cost::MEM_SET_ACCESS_OF_SEVERAL) } else { one };
        }
        Ok(ns)
    }
}

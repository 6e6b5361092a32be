//! What is outstanding, and the simulated machine's own counts.

use super::SimDriver;
use crate::driver::HandleProperties;
use crate::units::{Bytes, DeviceId, DevicePtr};
use std::fmt::Write;

/// How many things of one sort an audit names one by one.
const NAMED: usize = 8;

/// Memory of one piece: a mapped handle, or a plain allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Piece {
    /// Where it begins.
    pub address: DevicePtr,
    /// How long it is.
    pub bytes: u64,
    /// What the handle was made for; `None` for a plain allocation.
    pub made_for: Option<HandleProperties>,
}

impl SimDriver {
    /// Whether everything taken was given back: memory, addresses, handles, mappings, streams, events, modules.
    ///
    /// # Errors
    /// A list of what is outstanding, a line each.
    pub fn audit(&self) -> Result<(), String> {
        let state = self.state.lock();
        let mut report = String::new();
        let vmm = &state.vmm;
        list(
            &mut report,
            "plain allocation",
            state.plain.allocations.iter().map(|(&at, plain)| {
                let order = if plain.ordered.is_some() { ", in the order of a stream" } else { "" };
                format!("{} bytes of {:?} memory of device {} at {:#x}{order}", plain.bytes, plain.kind, plain.device, at)
            }),
        );
        list(
            &mut report,
            "handle",
            vmm.handles
                .iter()
                .filter(|(_, physical)| !physical.released)
                .map(|(value, physical)| format!("{value:#x} of {} bytes on device {}", physical.bytes, physical.device)),
        );
        list(&mut report, "mapping", vmm.mappings.iter().map(|(&at, mapping)| format!("{} bytes at {at:#x}", mapping.bytes)));
        list(&mut report, "reservation", vmm.reservations.iter().map(|(&at, &bytes)| format!("{} at {at:#x}", Bytes(bytes))));
        list(&mut report, "stream", state.queues.handles.iter().map(|(value, key)| format!("{value:#x}, id {key}")));
        list(&mut report, "event", state.queues.events.iter().map(|(value, _)| format!("{value:#x}")));
        list(&mut report, "module", state.modules.modules.iter().map(|(value, device)| format!("{value:#x} on device {device}")));
        for (device, memory) in state.devices.iter().enumerate().filter(|(_, memory)| memory.held_bytes > 0) {
            _ = writeln!(report, "device {device}: {} bytes held", memory.held_bytes);
        }
        if report.is_empty() { Ok(()) } else { Err(report) }
    }

    /// Physical bytes of a device's memory that are held at this moment; 0 for a device that is not there.
    #[must_use]
    pub fn held_bytes(&self, device: DeviceId) -> u64 {
        self.state.lock().devices.get(device.0 as usize).map_or(0, |device| device.held_bytes)
    }

    /// The most bytes of a device's memory that were held at any instant; 0 for a device that is not there.
    #[must_use]
    pub fn peak_bytes(&self, device: DeviceId) -> u64 {
        self.state.lock().devices.get(device.0 as usize).map_or(0, |device| device.peak_bytes)
    }

    /// The same, and what is held now is the most that was held from here on.
    pub fn restart_peak(&self, device: DeviceId) -> u64 {
        self.state
            .lock()
            .devices
            .get_mut(device.0 as usize)
            .map_or(0, |device| std::mem::replace(&mut device.peak_bytes, device.held_bytes))
    }

    /// Bytes of pinned and managed memory held.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.state.lock().plain.host_bytes
    }

    /// Handles created and not released.
    #[must_use]
    pub fn live_handles(&self) -> usize {
        self.state.lock().vmm.handles.iter().filter(|(_, physical)| !physical.released).count()
    }

    /// Mappings.
    #[must_use]
    pub fn live_mappings(&self) -> usize {
        self.state.lock().vmm.mappings.len()
    }

    /// Bytes of addresses in reservations.
    #[must_use]
    pub fn reserved_address_bytes(&self) -> u64 {
        self.state.lock().vmm.reserved_bytes
    }

    /// Plain allocations not freed.
    #[must_use]
    pub fn live_allocations(&self) -> usize {
        self.state.lock().plain.allocations.len()
    }

    /// Whether every byte of a range can be written by work of the device.
    #[must_use]
    pub fn is_writable(&self, device: DeviceId, address: DevicePtr, bytes: u64) -> bool {
        let state = self.state.lock();
        let touch = super::memory::Touch::write(address, bytes);
        state.device(device).is_ok_and(|index| state.touchable(index, touch, false))
    }

    /// The piece of memory that an address lies in.
    #[must_use]
    pub fn piece_at(&self, address: DevicePtr) -> Option<Piece> {
        let state = self.state.lock();
        let at = address.address();
        if let Some((start, mapping)) = state.vmm.mapping_at(at) {
            let made_for = state.vmm.handles.get(mapping.handle).map(|physical| physical.properties);
            return Some(Piece { address: DevicePtr::new(start), bytes: mapping.bytes, made_for });
        }
        let (&start, plain) = state.plain.allocations.range(..=at).next_back()?;
        (at < start + plain.bytes).then_some(Piece { address: DevicePtr::new(start), bytes: plain.bytes, made_for: None })
    }
}

fn list(report: &mut String, what: &str, items: impl Iterator<Item = String>) {
    let mut count = 0;
    for item in items {
        if count < NAMED {
            _ = writeln!(report, "{what}: {item}");
        }
        count += 1;
    }
    if count > NAMED {
        _ = writeln!(report, "{what}: … {count} in all");
    }
}

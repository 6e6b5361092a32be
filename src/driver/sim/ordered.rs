//! Allocations in the order of a stream. Their memory is charged, and has its address, from the call on; work may touch
//! it from where its stream comes to the allocation to where some stream comes to the free.

use super::memory::Phase;
use super::streams::Work;
use super::{SimDriver, State};
use crate::driver::{DriverResult, MemoryKind, StreamHandle};
use crate::error::CuResult;
use crate::units::{DeviceId, DevicePtr};

impl State {
    /// The index of a device that has memory pools.
    pub(super) fn device_with_pools(&self, device: DeviceId) -> DriverResult<usize> {
        let index = self.device(device)?;
        if self.config.devices[index].properties.memory_pools { Ok(index) } else { Err(CuResult::ERROR_NOT_SUPPORTED) }
    }

    /// A stream has come to an allocation.
    pub(super) fn ordered_begins(&mut self, address: DevicePtr) {
        if let Some(allocation) = self.plain.allocations.get_mut(&address.address())
            && allocation.ordered == Some(Phase::Coming)
        {
            allocation.ordered = Some(Phase::There);
        }
    }

    /// A stream has come to a free.
    ///
    /// # Panics
    /// Where work that is queued elsewhere touches the memory.
    pub(super) fn ordered_ends(&mut self, address: DevicePtr) {
        let bytes = self.plain.allocations.get(&address.address()).map_or(0, |allocation| allocation.bytes);
        self.refuse_in_use("cuMemFreeAsync", address.address(), bytes);
        self.forget_plain(address);
    }

    /// Whether an address is in an allocation that its stream has yet to come to.
    pub(super) fn is_coming(&self, address: u64) -> bool {
        let found = self.plain.allocations.range(..=address).next_back();
        found.is_some_and(|(&start, found)| address < start + found.bytes && found.ordered == Some(Phase::Coming))
    }
}

impl SimDriver {
    pub(super) fn allocate_ordered(&self, device: DeviceId, bytes: u64, stream: StreamHandle) -> DriverResult<DevicePtr> {
        let mut state = self.state.lock();
        let index = state.device_with_pools(device)?;
        let key = state.stream(device, stream)?;
        if bytes == 0 {
            return Ok(DevicePtr::NULL);
        }
        let address = state.place(index, MemoryKind::Device, bytes, Some(Phase::Coming))?;
        drop(self.submit(state, key, Vec::new(), Work::Allocate(address)));
        Ok(address)
    }

    pub(super) fn free_ordered(&self, device: DeviceId, address: DevicePtr, stream: StreamHandle) -> DriverResult<()> {
        let mut state = self.state.lock();
        let index = state.device_with_pools(device)?;
        let key = state.stream(device, stream)?;
        if address.is_null() {
            return Ok(());
        }
        let found = state.plain.allocations.get_mut(&address.address()).filter(|found| found.device == index);
        match found.and_then(|found| found.ordered.as_mut()).ok_or(CuResult::ERROR_INVALID_VALUE)? {
            Phase::Going => return Err(CuResult::ERROR_INVALID_VALUE),
            phase => *phase = Phase::Going,
        }
        drop(self.submit(state, key, Vec::new(), Work::Free(address)));
        Ok(())
    }
}

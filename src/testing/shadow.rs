//! The shadow allocator: what is live, by address.

use crate::pool::DeviceBuffer;
use crate::units::DevicePtr;
use std::collections::BTreeMap;

/// How a block is held.
#[derive(Debug)]
pub(super) enum Held {
    Raw,
    Buffer(DeviceBuffer),
}

/// Every live block, and some dead ones.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    live: BTreeMap<DevicePtr, (u64, Held)>,
    /// The last addresses freed.
    dead: Vec<DevicePtr>,
    /// Buffers whose block was freed under them.
    pub(super) stale: Vec<DeviceBuffer>,
}

impl Shadow {
    pub(super) fn len(&self) -> usize {
        self.live.len()
    }

    pub(super) fn requested(&self) -> u64 {
        self.live.values().map(|(size, _)| size).sum()
    }

    /// A block's address or a dead one's.
    pub(super) fn any(&self, which: u16) -> Option<DevicePtr> {
        let count = self.live.len() + self.dead.len();
        let which = usize::from(which).checked_rem(count)?;
        self.live.keys().chain(&self.dead).nth(which).copied()
    }

    pub(super) fn is_start(&self, address: DevicePtr) -> bool {
        self.live.contains_key(&address)
    }

    /// Notes a new block.
    ///
    /// # Errors
    /// It overlaps another.
    pub(super) fn insert(&mut self, address: DevicePtr, size: u64, held: Held) -> Result<(), String> {
        let below = self.live.range(..=address).next_back().filter(|(start, (size, _))| start.offset(*size) > address);
        let above = self.live.range(address..).next().filter(|(start, _)| address.offset(size) > **start);
        if let Some((other, (bytes, _))) = below.or(above) {
            return Err(format!("{size} bytes at {address} overlap {bytes} bytes at {other}"));
        }
        self.live.insert(address, (size, held));
        Ok(())
    }

    /// A live block's address and size. Where a buffer owns it, that too: the block is not listed then, until
    /// [`Self::resize`] puts it back.
    pub(super) fn lend(&mut self, which: u16) -> Option<(DevicePtr, u64, Option<DeviceBuffer>)> {
        let which = usize::from(which).checked_rem(self.live.len())?;
        let (&address, &(size, _)) = self.live.iter().nth(which)?;
        match self.live.remove(&address)?.1 {
            Held::Buffer(buffer) => Some((address, size, Some(buffer))),
            Held::Raw => {
                self.live.insert(address, (size, Held::Raw));
                Some((address, size, None))
            }
        }
    }

    /// Notes what a block has become.
    ///
    /// # Errors
    /// It overlaps another.
    pub(super) fn resize(&mut self, address: DevicePtr, size: u64, buffer: Option<DeviceBuffer>) -> Result<(), String> {
        self.live.remove(&address);
        self.insert(address, size, buffer.map_or(Held::Raw, Held::Buffer))
    }

    fn remove(&mut self, address: DevicePtr) -> (DevicePtr, Held) {
        let (_, held) = self.live.remove(&address).expect("the address was found a moment ago");
        if self.dead.len() == 64 {
            self.dead.remove(0);
        }
        self.dead.push(address);
        (address, held)
    }

    pub(super) fn take(&mut self, which: u16) -> Option<(DevicePtr, Held)> {
        let which = usize::from(which).checked_rem(self.live.len())?;
        let address = *self.live.keys().nth(which)?;
        Some(self.remove(address))
    }

    /// As `take`, among the blocks that no buffer owns.
    pub(super) fn take_raw(&mut self, which: u16) -> Option<DevicePtr> {
        let raw: Vec<DevicePtr> =
            self.live.iter().filter(|(_, (_, held))| matches!(held, Held::Raw)).map(|(&address, _)| address).collect();
        let address = *raw.get(usize::from(which).checked_rem(raw.len())?)?;
        Some(self.remove(address).0)
    }

    /// Every block, lowest first.
    pub(super) fn take_all(&mut self) -> Vec<(DevicePtr, Held)> {
        let addresses: Vec<DevicePtr> = self.live.keys().copied().collect();
        addresses.into_iter().map(|address| self.remove(address)).collect()
    }
}

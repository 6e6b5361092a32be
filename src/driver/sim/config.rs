//! What a simulated machine is made of.

use crate::driver::{DeviceProperties, Granularity, HandleTypes};
use crate::units::{GIB, MIB};

/// The most devices that one simulated machine has.
pub const MAX_DEVICES: usize = 32;

/// A simulated machine: its devices, its limits, and how it chooses the values it hands out.
///
/// Start from [`SimConfig::default`], one device like an H200, and change what matters:
///
/// ```
/// use vrampool::driver::sim::{SimConfig, SimDriver};
/// use vrampool::units::MIB;
///
/// let driver = SimDriver::new(SimConfig::default().capacity(64 * MIB).handle_limit(1000));
/// # drop(driver);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SimConfig {
    /// The devices, by ordinal; at most [`MAX_DEVICES`].
    pub devices: Vec<SimDevice>,
    /// What [`Driver::version`](crate::driver::Driver::version) answers.
    pub version: i32,
    /// The most bytes of addresses that reservations and plain allocations may take together.
    pub address_space_bytes: u64,
    /// The most physical handles alive at a time; one more is out of memory, as with the driver.
    pub handle_limit: u64,
    /// The most bytes of pinned and managed memory, which lie on the host.
    pub host_bytes: u64,
    /// Whether memory is there, so that bytes can be copied and kernels run, or only addresses.
    pub backed: bool,
    /// Whether one unmap may span several whole mappings, as an H200's driver allows. Off by default: portable code
    /// unmaps one mapping at a time.
    pub multi_unmap: bool,
    /// Where plain allocations come to lie.
    pub placement: PlainPlacement,
    /// Whether a freed address is handed out again as soon as it fits. On by default, as with the driver.
    pub reuse_addresses: bool,
    /// Whether the value of a destroyed stream, event, handle or module is the next one handed out. On by default: the
    /// driver may, and code that holds on to a dead handle should be found out.
    pub reuse_handles: bool,
    /// Whether the system lets this process make fabric handles. Devices that have them say so all the same.
    pub fabric_permitted: bool,
    /// Which devices reach each other's memory: `peers[device][peer]`. Empty: all of them do.
    pub peers: Vec<Vec<bool>>,
}

/// One simulated device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SimDevice {
    /// Its name, memory and capabilities.
    pub properties: DeviceProperties,
    /// Bytes of its memory that another process holds: not to be had, and not free in
    /// [`Driver::memory_info`](crate::driver::Driver::memory_info).
    pub other_process_bytes: u64,
    /// What handles and mappings must be multiples of; powers of two of at least 4 KiB.
    pub granularity: Granularity,
}

/// Where plain allocations come to lie in the address space.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum PlainPlacement {
    /// As the driver places them: 1 MiB and more on multiples of 2 MiB, less on multiples of 512.
    #[default]
    Driver,
    /// Each right behind the one before, on multiples of 256: segments touch that must not be merged.
    Adjacent,
    /// On odd multiples of 256, so that nothing has an alignment that was not asked for, and never touching.
    Odd,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            devices: vec![SimDevice::default()],
            version: 13_000,
            address_space_bytes: 64 << 40,
            handle_limit: 1 << 20,
            host_bytes: 1024 * GIB,
            backed: false,
            multi_unmap: false,
            placement: PlainPlacement::default(),
            reuse_addresses: true,
            reuse_handles: true,
            fabric_permitted: true,
            peers: Vec::new(),
        }
    }
}

impl Default for SimDevice {
    /// A device like an H200: 140 GiB, granularity 2 MiB, every capability.
    fn default() -> Self {
        let mut properties = DeviceProperties::new("Simulated H200", 140 * GIB);
        properties.compute_capability = (9, 0);
        properties.virtual_memory_management = true;
        properties.managed_memory = true;
        properties.memory_pools = true;
        properties.stream_ids = true;
        properties.rdma = true;
        properties.shareable = HandleTypes::FILE_DESCRIPTOR | HandleTypes::FABRIC;
        Self { properties, other_process_bytes: 0, granularity: Granularity { minimum_bytes: 2 * MIB, recommended_bytes: 2 * MIB } }
    }
}

impl SimConfig {
    /// As many devices as `count`, each like the first.
    #[must_use]
    pub fn device_count(mut self, count: usize) -> Self {
        let first = self.devices.first().cloned().unwrap_or_default();
        self.devices.resize(count, first);
        self
    }

    /// The memory of every device, in bytes.
    #[must_use]
    pub fn capacity(mut self, bytes: u64) -> Self {
        self.devices.iter_mut().for_each(|device| device.properties.total_bytes = bytes);
        self
    }

    /// The bytes of every device's memory that another process holds.
    #[must_use]
    pub fn other_process(mut self, bytes: u64) -> Self {
        self.devices.iter_mut().for_each(|device| device.other_process_bytes = bytes);
        self
    }

    /// The granularity of every device, minimum and recommended.
    #[must_use]
    pub fn granularity(mut self, bytes: u64) -> Self {
        let granularity = Granularity { minimum_bytes: bytes, recommended_bytes: bytes };
        self.devices.iter_mut().for_each(|device| device.granularity = granularity);
        self
    }

    /// Whether the devices have virtual memory management.
    #[must_use]
    pub fn virtual_memory_management(mut self, supported: bool) -> Self {
        self.devices.iter_mut().for_each(|device| device.properties.virtual_memory_management = supported);
        self
    }

    /// Whether the devices make handles that network cards reach.
    #[must_use]
    pub fn rdma(mut self, supported: bool) -> Self {
        self.devices.iter_mut().for_each(|device| device.properties.rdma = supported);
        self
    }

    /// How the devices' handles can be shared.
    #[must_use]
    pub fn shareable(mut self, supported: HandleTypes) -> Self {
        self.devices.iter_mut().for_each(|device| device.properties.shareable = supported);
        self
    }

    /// Whether this process may make fabric handles where the devices have them.
    #[must_use]
    pub fn fabric_permitted(mut self, permitted: bool) -> Self {
        self.fabric_permitted = permitted;
        self
    }

    /// The limit of the address space, in bytes.
    #[must_use]
    pub fn address_space(mut self, bytes: u64) -> Self {
        self.address_space_bytes = bytes;
        self
    }

    /// The most handles alive at a time.
    #[must_use]
    pub fn handle_limit(mut self, handles: u64) -> Self {
        self.handle_limit = handles;
        self
    }

    /// Whether there is memory behind the addresses.
    #[must_use]
    pub fn backed(mut self, backed: bool) -> Self {
        self.backed = backed;
        self
    }

    /// Where plain allocations come to lie.
    #[must_use]
    pub fn placement(mut self, placement: PlainPlacement) -> Self {
        self.placement = placement;
        self
    }

    /// Whether one unmap may span several whole mappings.
    #[must_use]
    pub fn multi_unmap(mut self, allowed: bool) -> Self {
        self.multi_unmap = allowed;
        self
    }

    /// Whether freed addresses, and the values of dead handles, are handed out again.
    #[must_use]
    pub fn reuse(mut self, reuse: bool) -> Self {
        self.reuse_addresses = reuse;
        self.reuse_handles = reuse;
        self
    }

    /// Whether work on `device` reaches the memory of `peer`, in that direction.
    #[must_use]
    pub fn peer(mut self, device: usize, peer: usize, reachable: bool) -> Self {
        let count = self.devices.len();
        self.peers.resize_with(count, Vec::new);
        self.peers.iter_mut().for_each(|row| row.resize(count, true));
        self.peers[device][peer] = reachable;
        self
    }

    pub(super) fn can_access_peer(&self, device: usize, peer: usize) -> bool {
        device != peer && self.peers.get(device).and_then(|row| row.get(peer)).copied().unwrap_or(true)
    }
}

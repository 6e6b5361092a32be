//! What the machine is made of.
//!
//! A profile is a text `key=value,…`, from `fake_configure` or else from the variable `VRAMPOOL_FAKE`:
//!
//! | key | default | |
//! |---|---|---|
//! | `profile` | `h200` | where to start from: `h200`, `jetson` (integrated, no virtual memory management or pools), `mig` (a slice, no peers), `wsl` (little pinned memory) |
//! | `version` | 13000 | the driver's; functions that came later are not found by `cuGetProcAddress` |
//! | `devices` | 1 | none: `cuInit` returns 100, `CUDA_ERROR_NO_DEVICE` |
//! | `memory` | 1GiB | of each device |
//! | `granularity` | 2MiB | of virtual memory management |
//! | `vmm`, `pools`, `managed`, `ids` | 1 | whether there is virtual memory management, a stream-ordered allocator, managed memory, and ids of streams |
//! | `rdma` | 1 | whether handles can be made for network cards |
//! | `shareable` | fd+fabric | how handles can be shared |
//! | `imex` | 1 | whether fabric handles are permitted |
//! | `peers` | 1 | whether devices reach each other |
//! | `mps` | none | the memory that a client of the multi-process service may take. `cuMemGetInfo` knows nothing of it |
//! | `pinned` | 1TiB | the pinned and managed memory that there is |
//! | `backed` | 1 | whether bytes are there |
//! | `stub` | 0 | every call returns 34, as the toolkit's stub does |
//! | `spoil` | none | the launch of the kernel `fill` (0: the first) whose first word comes out wrong |
//! | `hide` | none | functions that `cuGetProcAddress` does not find, with `+` between them |

use vrampool::driver::HandleTypes;
use vrampool::driver::sim::SimConfig;
use vrampool::units::{MIB, parse_bytes};

/// A machine.
pub(crate) struct Profile {
    pub(crate) sim: SimConfig,
    /// Bytes that `cuMemGetInfo` calls free though this process may not take them.
    pub(crate) withheld_bytes: u64,
    pub(crate) stub: bool,
    pub(crate) spoiled_fill: Option<u32>,
    pub(crate) hidden: Vec<String>,
}

struct Keys {
    name: String,
    integrated: bool,
    compute_capability: (u32, u32),
    devices: usize,
    memory: u64,
    granularity: u64,
    vmm: bool,
    pools: bool,
    managed: bool,
    ids: bool,
    rdma: bool,
    shareable: HandleTypes,
    peers: bool,
    mps: Option<u64>,
}

impl Profile {
    /// Reads a profile.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut sim = SimConfig::default();
        sim.backed = true;
        let mut stub = false;
        let mut spoiled_fill = None;
        let mut hidden = Vec::new();
        let mut keys = Keys {
            name: "Fake H200".into(),
            integrated: false,
            compute_capability: (9, 0),
            devices: 1,
            memory: 1 << 30,
            granularity: 2 * MIB,
            vmm: true,
            pools: true,
            managed: true,
            ids: true,
            rdma: true,
            shareable: HandleTypes::FILE_DESCRIPTOR | HandleTypes::FABRIC,
            peers: true,
            mps: None,
        };
        for pair in text.split(',').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| format!("{pair:?} is no key=value"))?;
            let flag = || match value {
                "0" => Ok(false),
                "1" => Ok(true),
                _ => Err(format!("{key} is 0 or 1, not {value:?}")),
            };
            let number = || value.parse::<u32>().map_err(|error| format!("{key}: {error}"));
            match key {
                "profile" => keys.preset(value, &mut sim)?,
                "version" => sim.version = number()? as i32,
                "devices" => keys.devices = number()? as usize,
                "memory" => keys.memory = parse_bytes(value)?,
                "granularity" => keys.granularity = parse_bytes(value)?,
                "vmm" => keys.vmm = flag()?,
                "pools" => keys.pools = flag()?,
                "managed" => keys.managed = flag()?,
                "ids" => keys.ids = flag()?,
                "rdma" => keys.rdma = flag()?,
                "shareable" => keys.shareable = value.parse()?,
                "imex" => sim.fabric_permitted = flag()?,
                "peers" => keys.peers = flag()?,
                "mps" => keys.mps = Some(parse_bytes(value)?),
                "pinned" => sim.host_bytes = parse_bytes(value)?,
                "backed" => sim.backed = flag()?,
                "stub" => stub = flag()?,
                "spoil" => spoiled_fill = Some(number()?),
                "hide" => hidden.extend(value.split('+').map(str::to_owned)),
                _ => return Err(format!("there is no key {key:?}")),
            }
        }
        let withheld_bytes = keys.mps.map_or(0, |limit| keys.memory.saturating_sub(limit));
        Ok(Self { sim: keys.machine(sim).other_process(withheld_bytes), withheld_bytes, stub, spoiled_fill, hidden })
    }
}

impl Keys {
    fn preset(&mut self, name: &str, sim: &mut SimConfig) -> Result<(), String> {
        match name {
            "h200" => {}
            "jetson" => {
                self.name = "Fake Orin (nvgpu)".into();
                (self.integrated, self.vmm, self.pools) = (true, false, false);
                self.compute_capability = (8, 7);
            }
            "mig" => {
                self.name = "Fake H200 MIG 1g.18gb".into();
                self.memory = 256 * MIB;
                self.peers = false;
            }
            "wsl" => {
                self.name = "Fake GeForce".into();
                self.compute_capability = (8, 9);
                sim.host_bytes = 128 * MIB;
            }
            _ => return Err(format!("there is no profile {name:?}")),
        }
        Ok(())
    }

    fn machine(self, sim: SimConfig) -> SimConfig {
        let mut sim =
            sim.capacity(self.memory).granularity(self.granularity).virtual_memory_management(self.vmm).device_count(self.devices);
        for device in &mut sim.devices {
            let properties = &mut device.properties;
            properties.name.clone_from(&self.name);
            properties.compute_capability = self.compute_capability;
            properties.integrated = self.integrated;
            properties.rdma = self.rdma && self.vmm && sim.version >= 11_000;
            properties.shareable = match sim.version {
                _ if !self.vmm => HandleTypes::NONE,
                ..12_030 => self.shareable.without(HandleTypes::FABRIC),
                _ => self.shareable,
            };
            properties.managed_memory = self.managed;
            properties.memory_pools = self.pools && sim.version >= 11_020;
            properties.stream_ids = self.ids && sim.version >= 12_000;
        }
        if !self.peers {
            sim.peers = vec![vec![false; self.devices]; self.devices];
        }
        sim
    }
}

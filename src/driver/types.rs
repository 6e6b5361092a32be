//! The driver's handles, properties and flags.

use crate::units::{DeviceId, DevicePtr};
use std::fmt;
use std::ops::BitOr;
use std::str::FromStr;

/// What kind of memory an allocation is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum MemoryKind {
    /// Memory of the device.
    #[default]
    Device,
    /// Page-locked memory of the host, which devices reach by the same address.
    Pinned,
    /// Memory that migrates between host and devices.
    Managed,
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Pinned => "pinned",
            Self::Managed => "managed",
        })
    }
}

impl FromStr for MemoryKind {
    type Err = String;

    /// # Errors
    /// A text that is no kind's name.
    fn from_str(text: &str) -> Result<Self, String> {
        let kinds = [Self::Device, Self::Pinned, Self::Managed];
        let named = kinds.into_iter().find(|kind| kind.to_string() == text);
        named.ok_or_else(|| format!("'{text}' is not device, pinned or managed"))
    }
}

/// What a device is and what it can do, each capability as the device itself answers.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DeviceProperties {
    /// The device's name, for people.
    pub name: String,
    /// Its memory in bytes.
    pub total_bytes: u64,
    /// Major and minor compute capability.
    pub compute_capability: (u32, u32),
    /// Whether the `mem_address_reserve`, `mem_create`, `mem_map` family works
    /// (`CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`).
    pub virtual_memory_management: bool,
    /// Whether managed memory works (`CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY`).
    pub managed_memory: bool,
    /// Whether the driver's own stream-ordered allocator works (`CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED`).
    pub memory_pools: bool,
    /// Whether the device shares its memory with the host (`CU_DEVICE_ATTRIBUTE_INTEGRATED`).
    pub integrated: bool,
    /// Whether streams have ids (`cuStreamGetId`).
    pub stream_ids: bool,
    /// Whether handles can be made for network cards to reach
    /// (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`).
    pub rdma: bool,
    /// How handles can be shared with other processes (`CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_…_SUPPORTED`). Fabric handles also
    /// take a permission that the system gives the process (an IMEX channel): only making one shows whether it has that.
    pub shareable: HandleTypes,
}

impl DeviceProperties {
    /// A device with this name and memory, with no capability.
    #[must_use]
    pub fn new(name: impl Into<String>, total_bytes: u64) -> Self {
        Self {
            name: name.into(),
            total_bytes,
            compute_capability: (0, 0),
            virtual_memory_management: false,
            managed_memory: false,
            memory_pools: false,
            integrated: false,
            stream_ids: false,
            rdma: false,
            shareable: HandleTypes::NONE,
        }
    }
}

/// A device's memory at this moment, in bytes, over all processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryInfo {
    /// Bytes not in use.
    pub free_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

/// What sizes of physical handles and addresses of mappings must be multiples of, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Granularity {
    /// What the driver insists on.
    pub minimum_bytes: u64,
    /// What it performs best with.
    pub recommended_bytes: u64,
}

/// Ways in which physical memory can be handed to another process (`CUmemAllocationHandleType`): a set of them.
///
/// As text a set is `none`, or names with `+` between them:
///
/// ```
/// use vrampool::driver::HandleTypes;
///
/// assert_eq!("fd+fabric".parse(), Ok(HandleTypes::FILE_DESCRIPTOR | HandleTypes::FABRIC));
/// assert_eq!(HandleTypes::FABRIC.to_string(), "fabric");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct HandleTypes(u32);

impl HandleTypes {
    /// None: the memory stays in its process.
    pub const NONE: Self = Self(0);
    /// A POSIX file descriptor, within one machine.
    pub const FILE_DESCRIPTOR: Self = Self(1);
    /// A fabric handle, within one NVLink domain.
    pub const FABRIC: Self = Self(8);

    const NAMES: [(&'static str, Self); 2] = [("fd", Self::FILE_DESCRIPTOR), ("fabric", Self::FABRIC)];

    /// The set with these bits, as the driver numbers them; of any value, since a driver may know more than is named here.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// The set's bits, as the driver numbers them.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether nothing is in the set.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether all of another set is in this one.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// What is in this set and not in the other.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitOr for HandleTypes {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for HandleTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = *self;
        let mut parts = Vec::new();
        for (name, kind) in Self::NAMES {
            if self.contains(kind) {
                parts.push(name.to_owned());
                rest = rest.without(kind);
            }
        }
        if !rest.is_empty() {
            parts.push(format!("{:#x}", rest.0));
        }
        if parts.is_empty() { f.write_str("none") } else { f.write_str(&parts.join("+")) }
    }
}

impl fmt::Debug for HandleTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandleTypes({self})")
    }
}

impl FromStr for HandleTypes {
    type Err = String;

    /// # Errors
    /// A name that is none of these, or one that comes twice.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self::NONE);
        }
        text.split('+').try_fold(Self::NONE, |set, part| {
            let (name, kind) = Self::NAMES
                .into_iter()
                .find(|&(name, _)| name == part.trim())
                .ok_or_else(|| format!("'{part}' is none of fd, fabric, fd+fabric and none"))?;
            if set.contains(kind) { Err(format!("'{name}' comes twice")) } else { Ok(set | kind) }
        })
    }
}

/// What physical memory is made for (`CUmemAllocationProp`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct HandleProperties {
    /// The device that the memory lies on.
    pub device: DeviceId,
    /// Whether network cards are to reach it (`gpuDirectRDMACapable`).
    pub rdma: bool,
    /// How it is to be shared with other processes (`requestedHandleTypes`).
    pub shareable: HandleTypes,
}

impl HandleProperties {
    /// Plain memory of a device.
    #[must_use]
    pub const fn on(device: DeviceId) -> Self {
        Self { device, rdma: false, shareable: HandleTypes::NONE }
    }
}

/// What a device may do with a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AccessFlags {
    /// Nothing: the state of a fresh mapping.
    None,
    /// Reading.
    Read,
    /// Reading and writing.
    ReadWrite,
}

/// Who may use a mapping, and how (`CUmemAccessDesc`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AccessDescriptor {
    /// The device whose work is allowed.
    pub device: DeviceId,
    /// What it may do.
    pub flags: AccessFlags,
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
            #[repr(transparent)]
            pub struct $name(pub u64);
        )*
    };
}

handles! {
    /// Physical memory made by one [`Driver::mem_create`](super::Driver::mem_create)
    /// (`CUmemGenericAllocationHandle`).
    PhysicalHandle;
    /// A stream (`CUstream`). The driver may give a destroyed stream's value to a new one.
    StreamHandle;
    /// An event (`CUevent`).
    EventHandle;
    /// A loaded module (`CUmodule`).
    ModuleHandle;
    /// A kernel (`CUfunction`).
    FunctionHandle;
}

impl StreamHandle {
    /// The default stream: the legacy one (`NULL`).
    pub const DEFAULT: Self = Self(0);
    /// The legacy default stream by its explicit name (`CU_STREAM_LEGACY`).
    pub const LEGACY: Self = Self(1);
    /// The calling thread's own default stream (`CU_STREAM_PER_THREAD`).
    pub const PER_THREAD: Self = Self(2);

    /// Whether the handle names one of the default streams.
    #[must_use]
    pub const fn is_default(self) -> bool {
        self.0 <= 2
    }
}

/// How a stream stands to the legacy default stream.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum StreamFlags {
    /// The stream and the legacy stream wait for each other (`CU_STREAM_DEFAULT`).
    Blocking,
    /// They do not (`CU_STREAM_NON_BLOCKING`).
    #[default]
    NonBlocking,
}

/// What a thread may not do while a capture is under way (`CUstreamCaptureMode`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CaptureMode {
    /// Unsafe calls are refused while any thread captures in this mode.
    Global,
    /// Unsafe calls are refused while this thread captures.
    ThreadLocal,
    /// No call is refused.
    Relaxed,
}

/// Whether a stream is being captured (`CUstreamCaptureStatus`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CaptureStatus {
    /// It is not.
    None,
    /// It is.
    Active,
    /// It was, and the capture has become invalid but has not been ended.
    Invalidated,
}

/// The shape of a kernel launch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LaunchConfig {
    /// Blocks in the grid, by dimension.
    pub grid: [u32; 3],
    /// Threads in a block, by dimension.
    pub block: [u32; 3],
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: u32,
}

/// One argument of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KernelArgument {
    /// An address.
    Pointer(DevicePtr),
    /// A 32-bit integer.
    U32(u32),
    /// A 64-bit integer.
    U64(u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_handle_types_are_read_as_they_are_printed() {
        let both = HandleTypes::FILE_DESCRIPTOR | HandleTypes::FABRIC;
        for (set, text) in
            [(HandleTypes::NONE, "none"), (HandleTypes::FILE_DESCRIPTOR, "fd"), (HandleTypes::FABRIC, "fabric"), (both, "fd+fabric")]
        {
            assert_eq!(set.to_string(), text);
            assert_eq!(text.parse(), Ok(set));
        }
        assert_eq!("fabric + fd".parse(), Ok(both));
        assert_eq!(HandleTypes::from_bits(2 | 8).to_string(), "fabric+0x2");
        for text in ["", "fd+", "+fd", "FD", "win32", "fd+none", "fd+fd", "0x1", "fd fabric"] {
            assert!(text.parse::<HandleTypes>().is_err(), "{text}");
        }
        assert_eq!((both.bits(), both.without(HandleTypes::FABRIC)), (9, HandleTypes::FILE_DESCRIPTOR));
        assert!(both.contains(HandleTypes::FABRIC) && both.contains(HandleTypes::NONE) && !HandleTypes::FABRIC.contains(both));
    }
}

//! The driver's handles, properties and flags.

use crate::units::{DeviceId, DevicePtr};

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

/// What physical memory is made for (`CUmemAllocationProp`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct HandleProperties {
    /// The device that the memory lies on.
    pub device: DeviceId,
}

impl HandleProperties {
    /// Plain memory of a device.
    #[must_use]
    pub const fn on(device: DeviceId) -> Self {
        Self { device }
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

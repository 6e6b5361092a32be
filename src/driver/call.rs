//! The driver's calls by name, for counting, timing and injecting faults.

use super::types::MemoryKind;

macro_rules! calls {
    ($($(#[$group:meta])* $variant:ident = $name:literal;)*) => {
        /// A call of the [`Driver`](super::Driver) trait.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Call {
            $(
                #[doc = concat!("`", $name, "`.")]
                $variant,
            )*
        }

        impl Call {
            /// Every call, in the order of the trait.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name of the CUDA function that the call stands for.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

calls! {
    Version = "cuDriverGetVersion";
    DeviceCount = "cuDeviceGetCount";
    DeviceProperties = "cuDeviceGetAttribute";
    CanAccessPeer = "cuDeviceCanAccessPeer";
    MemoryInfo = "cuMemGetInfo";
    MemAlloc = "cuMemAlloc";
    MemAllocHost = "cuMemAllocHost";
    MemAllocManaged = "cuMemAllocManaged";
    MemFree = "cuMemFree";
    MemFreeHost = "cuMemFreeHost";
    MemAllocAsync = "cuMemAllocAsync";
    MemFreeAsync = "cuMemFreeAsync";
    MemPoolThreshold = "cuMemPoolSetAttribute";
    MemGranularity = "cuMemGetAllocationGranularity";
    MemAddressReserve = "cuMemAddressReserve";
    MemAddressFree = "cuMemAddressFree";
    MemCreate = "cuMemCreate";
    MemRelease = "cuMemRelease";
    MemMap = "cuMemMap";
    MemUnmap = "cuMemUnmap";
    MemSetAccess = "cuMemSetAccess";
    StreamCreate = "cuStreamCreate";
    StreamDestroy = "cuStreamDestroy";
    StreamId = "cuStreamGetId";
    StreamQuery = "cuStreamQuery";
    StreamSynchronize = "cuStreamSynchronize";
    StreamWaitEvent = "cuStreamWaitEvent";
    StreamCaptureStatus = "cuStreamIsCapturing";
    ThreadExchangeCaptureMode = "cuThreadExchangeStreamCaptureMode";
    EventCreate = "cuEventCreate";
    EventDestroy = "cuEventDestroy";
    EventRecord = "cuEventRecord";
    EventQuery = "cuEventQuery";
    EventSynchronize = "cuEventSynchronize";
    ContextSynchronize = "cuCtxSynchronize";
    MemcpyAsync = "cuMemcpyAsync";
    MemcpyHostToDevice = "cuMemcpyHtoD";
    MemcpyDeviceToHost = "cuMemcpyDtoH";
    MemsetD8Async = "cuMemsetD8Async";
    LaunchHostFunction = "cuLaunchHostFunc";
    ModuleLoad = "cuModuleLoadData";
    ModuleUnload = "cuModuleUnload";
    ModuleFunction = "cuModuleGetFunction";
    LaunchKernel = "cuLaunchKernel";
}

impl Call {
    /// The call that allocates memory of a kind.
    pub(crate) const fn allocates(kind: MemoryKind) -> Self {
        match kind {
            MemoryKind::Device => Self::MemAlloc,
            MemoryKind::Pinned => Self::MemAllocHost,
            MemoryKind::Managed => Self::MemAllocManaged,
        }
    }

    /// The call that frees memory of a kind.
    pub(crate) const fn frees(kind: MemoryKind) -> Self {
        match kind {
            MemoryKind::Device | MemoryKind::Managed => Self::MemFree,
            MemoryKind::Pinned => Self::MemFreeHost,
        }
    }

    /// Whether the call takes, gives back, maps or unmaps memory or addresses.
    #[must_use]
    pub const fn manages_memory(self) -> bool {
        matches!(
            self,
            Self::MemAlloc
                | Self::MemAllocHost
                | Self::MemAllocManaged
                | Self::MemFree
                | Self::MemFreeHost
                | Self::MemAllocAsync
                | Self::MemFreeAsync
                | Self::MemAddressReserve
                | Self::MemAddressFree
                | Self::MemCreate
                | Self::MemRelease
                | Self::MemMap
                | Self::MemUnmap
                | Self::MemSetAccess
        )
    }

    /// Whether the call is one of streams, events or contexts, which reports count together.
    #[must_use]
    pub const fn synchronizes(self) -> bool {
        matches!(
            self,
            Self::StreamCreate
                | Self::StreamDestroy
                | Self::StreamId
                | Self::StreamQuery
                | Self::StreamSynchronize
                | Self::StreamWaitEvent
                | Self::StreamCaptureStatus
                | Self::ThreadExchangeCaptureMode
                | Self::EventCreate
                | Self::EventDestroy
                | Self::EventRecord
                | Self::EventQuery
                | Self::EventSynchronize
                | Self::ContextSynchronize
        )
    }
}

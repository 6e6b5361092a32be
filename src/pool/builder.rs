//! The options of a pool.

use super::core::Core;
use super::options::Options;
use super::request::{Request, Route};
use super::{OutOfMemoryCallback, Pool, Shared};
use crate::arena::{GRAIN_BYTES, MAX_GRAINS, MIN_PAGE_BYTES, Site};
use crate::buddy::Shape;
use crate::driver::{Call, Device, DeviceChoice, DeviceProperties, HandleProperties, HandleTypes, MemoryKind};
use crate::error::{CuResult, Error, OutOfMemory, Result};
use crate::sync::{Arc, Condvar, Mutex};
use crate::units::{Bytes, MIN_ALIGNMENT, align_down, checked_align_up};

/// The variable that has a pool's options.
const CONFIG_VARIABLE: &str = "VRAMPOOL_CONFIG";

/// Options for a pool. [`Pool::builder`] makes one with the defaults, which suit most programs:
///
/// | option | default | |
/// |---|---|---|
/// | [`device`](Self::device) | the first CUDA device | whose memory |
/// | [`kind`](Self::kind) | [`MemoryKind::Device`] | what memory |
/// | [`initial`](Self::initial) | 0 | taken from the driver at once |
/// | [`maximum`](Self::maximum) | none | the most that is held |
/// | [`growth`](Self::growth) | 0 | the least that is taken at a time, as a wish |
/// | [`alignment`](Self::alignment) | 256 | of every address |
/// | [`rdma`](Self::rdma) | no | whether network cards are to reach the memory |
/// | [`shareable`](Self::shareable) | none | how the memory is to be shared with other processes |
/// | [`no_vmm`](Self::no_vmm) | no | whether memory comes in plain allocations even where pages can be mapped |
/// | [`slack`](Self::slack) | 0.02 | what is held beyond the peak in use before memory is moved |
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct PoolBuilder {
    device: Option<Device>,
    pub(super) options: Options,
    on_out_of_memory: Option<OutOfMemoryCallback>,
}

impl PoolBuilder {
    /// The device. Without it the pool takes the first CUDA device, and never a simulated one.
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// The kind of memory.
    pub fn kind(mut self, kind: MemoryKind) -> Self {
        self.options.kind = kind;
        self
    }

    /// Bytes to take from the driver when the pool is built, rounded up to pages (or to the maximum, where that is
    /// less; and where the driver's addresses are such that alignment costs memory, to a page less than that).
    pub fn initial(mut self, bytes: u64) -> Self {
        self.options.initial = bytes;
        self
    }

    /// The most that the pool may hold from the driver at any moment, in bytes, rounded down to pages.
    pub fn maximum(mut self, bytes: u64) -> Self {
        self.options.maximum = Some(bytes);
        self
    }

    /// The least to take from the driver at a time, in bytes. It is a wish: where the driver or the maximum leave less,
    /// the pool halves it, down to what the request needs.
    pub fn growth(mut self, bytes: u64) -> Self {
        self.options.growth = bytes;
        self
    }

    /// What every address is a multiple of: 256 or 512 bytes.
    pub fn alignment(mut self, bytes: u64) -> Self {
        self.options.alignment = bytes;
        self
    }

    /// Whether network cards are to reach the memory (GPUDirect RDMA): handles are made for that then.
    /// [`Pool::handle_properties`] tells what a pool's memory is made for.
    pub fn rdma(mut self, rdma: bool) -> Self {
        self.options.rdma = rdma;
        self
    }

    /// How the memory is to be shared with other processes: handles are made such that they can be exported so.
    pub fn shareable(mut self, types: HandleTypes) -> Self {
        self.options.shareable = types;
        self
    }

    /// Whether to do without virtual memory management even where there is some. Memory then comes in plain allocations, which
    /// are freed whole or not at all, so that more of it is held; but functions of older kinds of sharing work on it.
    pub fn no_vmm(mut self, no_vmm: bool) -> Self {
        self.options.no_vmm = no_vmm;
        self
    }

    /// How much more than the most that was in use of late the pool takes from the driver, as a share of it, before it moves
    /// free memory to where a request needs it instead: 0.02 is two hundredths. Moving costs about 50 us for each piece of
    /// 2 to 32 MiB, so a pool that moves often allows itself more by and by; with 0.4 hardly anything is ever moved. Near
    /// the limit, and rather than fail, memory is moved whatever the slack. Of no effect where pages cannot be mapped.
    pub fn slack(mut self, share: f64) -> Self {
        self.options.slack = share;
        self
    }

    /// A function to call before a request fails for lack of memory. It may use the pool, and returns whether to look
    /// again; it is called once more each time that this has not helped.
    ///
    /// A function that itself runs out of memory of this pool is called again from within, so it should not ask for what
    /// it cannot get. One that owns a handle of its own pool keeps the pool alive for ever.
    pub fn on_out_of_memory(mut self, callback: impl Fn(&OutOfMemory) -> bool + Send + Sync + 'static) -> Self {
        self.on_out_of_memory = Some(OutOfMemoryCallback(Arc::new(callback)));
        self
    }

    /// Sets options from text: `key=value` pairs with commas between, a key being an option's name here. Sizes read as
    /// [`parse_bytes`](crate::units::parse_bytes) reads them, kinds are `device`, `pinned` and `managed`, types to share by are
    /// `none`, `fd`, `fabric` and `fd+fabric`, a share is a number such as `0.02`, and what is or is not is `true` or `false`. Empty text sets nothing.
    ///
    /// ```
    /// let builder = vrampool::Pool::builder().configure("initial=64MiB,maximum=8GiB,shareable=fd")?;
    /// # Ok::<(), vrampool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::is_invalid_argument`]: an unknown key, a key set twice, or a value that cannot be read. Nothing is set
    /// then.
    pub fn configure(mut self, text: &str) -> Result<Self> {
        self.options.configure(text)?;
        Ok(self)
    }

    /// Sets options from the variable `VRAMPOOL_CONFIG`, as [`Self::configure`] does. One that is unset or empty sets nothing.
    ///
    /// # Errors
    /// As [`Self::configure`], naming the variable.
    pub fn configure_from_env(self) -> Result<Self> {
        let text = std::env::var_os(CONFIG_VARIABLE).unwrap_or_default();
        let named = |error: Error| Error::invalid_argument(format!("{CONFIG_VARIABLE}: {error}"));
        self.configure(&text.to_string_lossy()).map_err(named)
    }

    /// Options for a pool as the environment has them: `VRAMPOOL_CONFIG` as [`Self::configure`] reads it, and the device that
    /// `VRAMPOOL_DEVICE` names ([`DeviceChoice`]). What is set afterwards wins.
    ///
    /// ```no_run
    /// let pool = vrampool::PoolBuilder::from_env()?.build()?;
    /// # Ok::<(), vrampool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::is_invalid_argument`]: a variable cannot be read. [`Error::is_unavailable`]: the device that is named is not
    /// there.
    pub fn from_env() -> Result<Self> {
        let builder = Self::default().configure_from_env()?;
        match DeviceChoice::from_env()? {
            DeviceChoice::Auto => Ok(builder),
            choice => Ok(builder.device(choice.open()?)),
        }
    }

    /// The options in the form that [`Self::configure`] reads, without those that are as by default.
    #[must_use]
    pub fn config(&self) -> String {
        self.options.to_string()
    }

    /// Builds the pool.
    ///
    /// # Errors
    /// - [`Error::is_unavailable`]: there is no device, or it lacks this kind of memory, or it or this process cannot have
    ///   memory made for what is asked.
    /// - [`Error::is_invalid_argument`]: a maximum below one page or below the initial size, another alignment than 256 or
    ///   512, a slack that is not a share from 0 to 1000, or memory made for something where there is no virtual memory management: with [`Self::no_vmm`], or another
    ///   kind than [`MemoryKind::Device`].
    /// - [`Error::is_out_of_memory`], [`Error::is_driver`]: the initial size could not be had.
    pub fn build(self) -> Result<Pool> {
        let options = self.options;
        options.check()?;
        let device = self.device.map_or_else(Device::first, Ok)?;
        let properties = device.properties()?;
        if options.kind == MemoryKind::Managed && !properties.managed_memory {
            return Err(Error::unavailable(format!("device {} has no managed memory", device.id())));
        }
        let mut handle_properties = HandleProperties::on(device.id());
        (handle_properties.rdma, handle_properties.shareable) = (options.rdma, options.shareable);
        refuse_what_lacks(&properties, &handle_properties)?;
        let granularity = match options.kind {
            MemoryKind::Device if properties.virtual_memory_management && !options.no_vmm => {
                mapping_granularity(&device, &handle_properties)?
            }
            _ => None,
        };
        let maps_pages = granularity.is_some();
        let page_bytes = MIN_PAGE_BYTES.max(granularity.unwrap_or(0));
        let capacity = options.maximum.map(|maximum| align_down(maximum, page_bytes));
        if capacity == Some(0) {
            // In full: a byte short of a page would read as a page.
            let maximum = options.maximum.unwrap_or_default();
            return Err(Error::invalid_argument(format!("a maximum of {maximum} bytes is less than one page of {}", Bytes(page_bytes))));
        }
        if let Some(maximum) = options.maximum.filter(|&maximum| options.initial > maximum) {
            return Err(Error::invalid_argument(format!("initially {}, but at most {}", Bytes(options.initial), Bytes(maximum))));
        }
        // The device's memory bounds only what lies on it.
        let device_bytes = if options.kind == MemoryKind::Device { properties.total_bytes } else { u64::MAX };
        let memory_bytes = capacity.unwrap_or(u64::MAX).min(device_bytes).min(u64::from(MAX_GRAINS) * GRAIN_BYTES);
        if handle_properties != HandleProperties::on(device.id()) {
            try_one(&device, page_bytes, &handle_properties)?;
        }
        let driver = Arc::clone(device.driver());
        let site = Arc::new(Site { driver, device: device.id(), kind: options.kind, page_bytes, maps_pages, handle_properties });
        let initial = options.initial;
        let shared = Shared {
            core: Mutex::new(Core::new(Arc::clone(&site), capacity, options.slack)),
            site,
            settled: Condvar::new(),
            options,
            memory_bytes,
            on_out_of_memory: self.on_out_of_memory,
        };
        if initial > 0 {
            shared.take_initially(initial, capacity)?;
        }
        Ok(Pool { shared: Arc::new(shared) })
    }
}

/// Checks that a device can have memory made for what is asked.
///
/// # Errors
/// Unavailable, naming what is missing.
fn refuse_what_lacks(able: &DeviceProperties, asked: &HandleProperties) -> Result<()> {
    let HandleProperties { device, rdma, shareable } = *asked;
    let lacking = shareable.without(able.shareable);
    if (rdma || !shareable.is_empty()) && !able.virtual_memory_management {
        return Err(Error::unavailable(format!("device {device} has no virtual memory management, which rdma and shareable are of")));
    }
    if rdma && !able.rdma {
        return Err(Error::unavailable(format!("device {device} has no memory that network cards reach (rdma)")));
    }
    if !lacking.is_empty() {
        return Err(Error::unavailable(format!("device {device} has no memory that can be shared so (shareable={lacking})")));
    }
    Ok(())
}

/// Makes one page and gives it back: whether this process may have memory that the device can, only that shows.
///
/// # Errors
/// Unavailable, where it may not; the driver's failure. That there is no memory at this moment is none.
fn try_one(device: &Device, page_bytes: u64, properties: &HandleProperties) -> Result<()> {
    let HandleProperties { rdma, shareable, .. } = properties;
    let driver = device.driver();
    match driver.mem_create(page_bytes, properties) {
        Ok(handle) => {
            // Nobody is left to ask again later.
            let released = driver.mem_release(handle).or_else(|_| driver.mem_release(handle));
            released.map_err(|code| Error::driver(Call::MemRelease.name(), code))
        }
        Err(CuResult::ERROR_OUT_OF_MEMORY) => Ok(()),
        Err(code @ (CuResult::ERROR_NOT_PERMITTED | CuResult::ERROR_NOT_SUPPORTED)) => {
            let channel = if shareable.contains(HandleTypes::FABRIC) { "; fabric handles need an IMEX channel" } else { "" };
            Err(Error::unavailable(format!(
                "this process cannot have memory of device {} with rdma={rdma},shareable={shareable}: cuMemCreate answered {code}{channel}",
                device.id()
            )))
        }
        Err(code) => Err(Error::driver(Call::MemCreate.name(), code)),
    }
}

/// What a device maps memory in units of; `None` where the driver says at last that it does not.
fn mapping_granularity(device: &Device, properties: &HandleProperties) -> Result<Option<u64>> {
    let is_plain = *properties == HandleProperties::on(device.id());
    match device.driver().mem_granularity(properties) {
        Ok(granularity) if granularity.minimum_bytes.is_power_of_two() => Ok(Some(granularity.minimum_bytes)),
        Ok(granularity) => {
            Err(Error::unavailable(format!("device {} maps memory in units of {} bytes", device.id(), granularity.minimum_bytes)))
        }
        Err(CuResult::ERROR_NOT_SUPPORTED) if is_plain => Ok(None),
        Err(CuResult::ERROR_NOT_SUPPORTED) => {
            Err(Error::unavailable(format!("device {} has no virtual memory management, which rdma and shareable are of", device.id())))
        }
        Err(code) => Err(Error::driver("cuMemGetAllocationGranularity", code)),
    }
}

impl Shared {
    /// Takes memory from the driver for later: a block of whole pages, freed at once.
    fn take_initially(&self, initial: u64, capacity: Option<u64>) -> Result<()> {
        let too_large = || Error::invalid_argument(format!("an initial size of {} is more than any pool can hold", Bytes(initial)));
        let pages = checked_align_up(initial, self.site.page_bytes).ok_or_else(too_large)?;
        let most = capacity.unwrap_or(u64::MAX);
        let outcome = self.take_pages(pages.min(most), too_large);
        // An initial size near the maximum leaves no room for what alignment costs; that shows when it is tried.
        let padding = self.core.lock().buddy.arena.plain_bytes(0);
        match align_down(most - padding, self.site.page_bytes) {
            less if outcome.as_ref().is_err_and(Error::is_out_of_memory) && 0 < less && less < pages.min(most) => {
                self.take_pages(less, too_large)
            }
            _ => outcome,
        }
    }

    fn take_pages(&self, bytes: u64, too_large: impl Fn() -> Error) -> Result<()> {
        let grains = u32::try_from(bytes / GRAIN_BYTES).ok().filter(|&grains| grains <= MAX_GRAINS).ok_or_else(too_large)?;
        let shape = Shape { grains, alignment: GRAIN_BYTES, one_handle: false, at: None };
        let served = self.grow(&Request { size: bytes, alignment: MIN_ALIGNMENT, route: Route::Run, shape })?;
        self.free(served.address, Some(served.serial))?;
        self.core.lock().forget_history();
        Ok(())
    }
}

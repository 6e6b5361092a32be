//! The options of a pool.

use super::core::Core;
use super::request::{Request, Route};
use super::{OutOfMemoryCallback, Pool, Shared};
use crate::arena::{GRAIN_BYTES, MAX_GRAINS, MIN_PAGE_BYTES, Site};
use crate::buddy::Shape;
use crate::driver::{Device, HandleProperties, MemoryKind};
use crate::error::{Error, OutOfMemory, Result};
use crate::sync::{Arc, Condvar, Mutex};
use crate::units::{Bytes, MIN_ALIGNMENT, align_down, checked_align_up, parse_bytes};

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
#[derive(Clone, Debug)]
#[must_use]
pub struct PoolBuilder {
    device: Option<Device>,
    kind: MemoryKind,
    initial: u64,
    maximum: Option<u64>,
    growth: u64,
    alignment: u64,
    slack: f64,
    on_out_of_memory: Option<OutOfMemoryCallback>,
}

impl Default for PoolBuilder {
    fn default() -> Self {
        Self {
            device: None,
            kind: MemoryKind::default(),
            initial: 0,
            maximum: None,
            growth: 0,
            alignment: MIN_ALIGNMENT,
            slack: std::env::var("SLACK").map_or(0.03, |s| s.parse().unwrap()),
            on_out_of_memory: None,
        }
    }
}

impl PoolBuilder {
    /// The device. Without it the pool takes the first CUDA device, and never a simulated one.
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// The kind of memory.
    pub fn kind(mut self, kind: MemoryKind) -> Self {
        self.kind = kind;
        self
    }

    /// Bytes to take from the driver when the pool is built, rounded up to pages (or to the maximum, where that is
    /// less; and where the driver's addresses are such that alignment costs memory, to a page less than that).
    pub fn initial(mut self, bytes: u64) -> Self {
        self.initial = bytes;
        self
    }

    /// The most that the pool may hold from the driver at any moment, in bytes, rounded down to pages.
    pub fn maximum(mut self, bytes: u64) -> Self {
        self.maximum = Some(bytes);
        self
    }

    /// The least to take from the driver at a time, in bytes. It is a wish: where the driver or the maximum leave less,
    /// the pool halves it, down to what the request needs.
    pub fn growth(mut self, bytes: u64) -> Self {
        self.growth = bytes;
        self
    }

    /// What every address is a multiple of: 256 or 512 bytes.
    pub fn alignment(mut self, bytes: u64) -> Self {
        self.alignment = bytes;
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
    /// [`parse_bytes`] reads them, kinds are `device`, `pinned` and `managed`. Empty text sets nothing.
    ///
    /// ```
    /// let builder = vrampool::Pool::builder().configure("initial=64MiB,maximum=8GiB,kind=device")?;
    /// # Ok::<(), vrampool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::is_invalid_argument`]: an unknown key, a key set twice, or a value that cannot be read. Nothing is set
    /// then.
    pub fn configure(mut self, text: &str) -> Result<Self> {
        let mut seen = Vec::new();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let malformed = || Error::invalid_argument(format!("option '{pair}' is not of the form key=value"));
            let (key, value) = pair.split_once('=').ok_or_else(malformed)?;
            let (key, value) = (key.trim(), value.trim());
            if seen.contains(&key) {
                return Err(Error::invalid_argument(format!("option '{key}' is set twice")));
            }
            seen.push(key);
            let bytes = || parse_bytes(value).map_err(|why| Error::invalid_argument(format!("option '{key}': {why}")));
            self = match key {
                "kind" => self.kind(match value {
                    "device" => MemoryKind::Device,
                    "pinned" => MemoryKind::Pinned,
                    "managed" => MemoryKind::Managed,
                    _ => return Err(Error::invalid_argument(format!("option 'kind': '{value}' is not device, pinned or managed"))),
                }),
                "initial" => self.initial(bytes()?),
                "maximum" => self.maximum(bytes()?),
                "growth" => self.growth(bytes()?),
                "alignment" => self.alignment(bytes()?),
                _ => {
                    return Err(Error::invalid_argument(format!(
                        "option '{key}' is not known (kind, initial, maximum, growth, alignment)"
                    )));
                }
            };
        }
        Ok(self)
    }

    /// Builds the pool.
    ///
    /// # Errors
    /// - [`Error::is_unavailable`]: there is no device, or it lacks this kind of memory.
    /// - [`Error::is_invalid_argument`]: a maximum below one page or below the initial size, or another alignment than
    ///   256 or 512.
    /// - [`Error::is_out_of_memory`], [`Error::is_driver`]: the initial size could not be had.
    pub fn build(self) -> Result<Pool> {
        let device = self.device.map_or_else(Device::first, Ok)?;
        let properties = device.properties()?;
        if self.kind == MemoryKind::Managed && !properties.managed_memory {
            return Err(Error::unavailable(format!("device {} has no managed memory", device.id())));
        }
        let mut page_bytes = MIN_PAGE_BYTES;
        let maps_pages = self.kind == MemoryKind::Device && properties.virtual_memory_management;
        if maps_pages {
            let granularity = device
                .driver()
                .mem_granularity(&HandleProperties::on(device.id()))
                .map_err(|code| Error::driver("cuMemGetAllocationGranularity", code))?
                .minimum_bytes;
            if !granularity.is_power_of_two() {
                return Err(Error::unavailable(format!("device {} maps memory in units of {granularity} bytes", device.id())));
            }
            page_bytes = page_bytes.max(granularity);
        }
        if ![MIN_ALIGNMENT, 2 * MIN_ALIGNMENT].contains(&self.alignment) {
            return Err(Error::invalid_argument(format!("a pool's alignment is 256 or 512 bytes, not {}", self.alignment)));
        }
        let capacity = self.maximum.map(|maximum| align_down(maximum, page_bytes));
        if capacity == Some(0) {
            // In full: a byte short of a page would read as a page.
            let maximum = self.maximum.unwrap_or_default();
            return Err(Error::invalid_argument(format!("a maximum of {maximum} bytes is less than one page of {}", Bytes(page_bytes))));
        }
        if let Some(maximum) = self.maximum.filter(|&maximum| self.initial > maximum) {
            return Err(Error::invalid_argument(format!("initially {}, but at most {}", Bytes(self.initial), Bytes(maximum))));
        }
        // The device's memory bounds only what lies on it.
        let device_bytes = if self.kind == MemoryKind::Device { properties.total_bytes } else { u64::MAX };
        let memory_bytes = capacity.unwrap_or(u64::MAX).min(device_bytes).min(u64::from(MAX_GRAINS) * GRAIN_BYTES);
        let site = Arc::new(Site { driver: Arc::clone(device.driver()), device: device.id(), kind: self.kind, page_bytes, maps_pages });
        let shared = Shared {
            core: Mutex::new(Core::new(Arc::clone(&site), capacity, self.slack)),
            site,
            settled: Condvar::new(),
            growth_bytes: self.growth,
            alignment: self.alignment,
            memory_bytes,
            on_out_of_memory: self.on_out_of_memory,
        };
        if self.initial > 0 {
            shared.take_initially(self.initial, capacity)?;
        }
        Ok(Pool { shared: Arc::new(shared) })
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
        let shape = Shape { grains, alignment: GRAIN_BYTES };
        let served = self.grow(&Request { size: bytes, alignment: MIN_ALIGNMENT, route: Route::Run, shape })?;
        self.free(served.address, Some(served.serial))?;
        self.core.lock().forget_history();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_from_text() {
        let builder = Pool::builder().configure(" kind=pinned, initial=1MiB,maximum=2GiB ,growth=4096,alignment=512,").unwrap();
        assert_eq!(builder.kind, MemoryKind::Pinned);
        assert_eq!((builder.initial, builder.maximum, builder.growth, builder.alignment), (1 << 20, Some(2 << 30), 4096, 512));
        let untouched = Pool::builder().configure("").unwrap();
        assert_eq!((untouched.kind, untouched.initial, untouched.maximum), (MemoryKind::Device, 0, None));
    }

    #[test]
    fn unusable_text_is_refused_with_the_reason() {
        for (text, reason) in [
            ("maximun=1", "'maximun' is not known"),
            ("maximum", "key=value"),
            ("maximum=", "'maximum'"),
            ("maximum=1GB", "unit"),
            ("initial=-1", "'initial'"),
            ("kind=host", "'host'"),
            ("growth=1,growth=1", "twice"),
        ] {
            let error = Pool::builder().configure(text).unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains(reason), "{text}: {error}");
        }
    }
}

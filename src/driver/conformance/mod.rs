//! One suite of checks for every driver: what must work, and what must be refused with which code.
//!
//! [`run`] makes calls through the trait alone, so the same checks judge the simulated device and a GPU. The codes are
//! those seen on an H200 with driver 580 (CUDA 13.0). What a driver may crash on is left out — dead handles of streams,
//! events and physical memory, copies of addresses where nothing is — and so is what drivers are more lenient with than
//! [`Driver`] lets its callers be: one unmap over several mappings, over holes, or over nothing, mappings that reach past
//! the end of their reservation, plain memory freed through another device, and memory allocated in the order of a stream
//! freed as plain memory or the other way round.

mod ordered;

mod purposes;

use super::{
    AccessDescriptor, AccessFlags, CaptureMode, CaptureStatus, Driver, DriverResult, HandleProperties, KernelArgument, LaunchConfig,
    MemoryKind, PhysicalHandle, StreamFlags, StreamHandle,
};
use crate::driver::kernels::{BUILTIN_MODULE, pattern};
use crate::error::CuResult;
use crate::sync::{AtomicU64, Ordering};
use crate::units::{DeviceId, DevicePtr, MIB};
use std::fmt;
use std::sync::Arc;

/// One check: what was done, what should come of it, and what did.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Check {
    /// What was done.
    pub name: &'static str,
    /// What should come of it: `ok`, a value, or a code.
    pub expected: String,
    /// What came of it.
    pub observed: String,
}

impl Check {
    /// Whether the driver did what it should.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.expected == self.observed
    }
}

/// What came of a suite of checks. It prints as a list, a line each.
#[derive(Clone, Default, Debug)]
pub struct Report {
    checks: Vec<Check>,
}

impl Report {
    /// Every check, in the order made.
    #[must_use]
    pub fn checks(&self) -> &[Check] {
        &self.checks
    }

    /// Those that did not pass.
    #[must_use]
    pub fn failures(&self) -> Vec<&Check> {
        self.checks.iter().filter(|check| !check.passed()).collect()
    }

    fn add(&mut self, name: &'static str, expected: impl fmt::Debug, observed: impl fmt::Debug) {
        self.checks.push(Check { name, expected: format!("{expected:?}"), observed: format!("{observed:?}") });
    }

    /// The call must succeed.
    fn works<T>(&mut self, name: &'static str, result: DriverResult<T>) -> Option<T> {
        let (value, outcome) = match result {
            Ok(value) => (Some(value), Ok(())),
            Err(code) => (None, Err(code)),
        };
        self.add(name, Ok::<(), CuResult>(()), outcome);
        value
    }

    /// The call must be refused with this code.
    fn refused<T>(&mut self, name: &'static str, result: DriverResult<T>, code: CuResult) {
        self.add(name, Err::<(), CuResult>(code), result.map(|_| ()));
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for check in &self.checks {
            let mark = if check.passed() { "ok  " } else { "FAIL" };
            write!(f, "{mark} {}: {}", check.name, check.observed)?;
            if !check.passed() {
                write!(f, ", expected {}", check.expected)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

const INVALID: CuResult = CuResult::ERROR_INVALID_VALUE;
const NO_MEMORY: CuResult = CuResult::ERROR_OUT_OF_MEMORY;
const NOT_SUPPORTED: CuResult = CuResult::ERROR_NOT_SUPPORTED;
const BAD_HANDLE: CuResult = CuResult::ERROR_INVALID_HANDLE;

/// Checks a driver on one device. It takes memory and gives all of it back; a device in use by others may refuse memory.
#[must_use]
pub fn run(driver: &dyn Driver, device: DeviceId) -> Report {
    let mut suite = Suite { driver, device, report: Report::default() };
    suite.devices();
    suite.plain();
    match suite.driver.device_properties(device) {
        Ok(properties) if properties.virtual_memory_management => suite.virtual_memory(),
        _ => {
            let answer = driver.mem_granularity(&HandleProperties::on(device));
            suite.report.refused("granularity without virtual memory management", answer, NOT_SUPPORTED);
        }
    }
    suite.stream_ordered();
    suite.streams();
    suite.work();
    suite.other_device();
    suite.report
}

/// Checks what a driver answers after a kernel touched memory that it may not. The device's context is broken
/// afterwards, for the rest of the process, and a module stays loaded in it.
#[must_use]
pub fn run_broken(driver: &dyn Driver, device: DeviceId) -> Report {
    let mut suite = Suite { driver, device, report: Report::default() };
    suite.broken();
    suite.report
}

struct Suite<'a> {
    driver: &'a dyn Driver,
    device: DeviceId,
    report: Report,
}

/// A shape that the built-in kernels take.
const SHAPE: LaunchConfig = LaunchConfig { grid: [4, 1, 1], block: [64, 1, 1], shared_bytes: 0 };

impl Suite<'_> {
    fn devices(&mut self) {
        let Self { driver, device, report } = self;
        let count = report.works("the number of devices", driver.device_count()).unwrap_or(0);
        report.works("the version", driver.version());
        let nobody = DeviceId(count);
        report.refused("properties of no device", driver.device_properties(nobody), CuResult::ERROR_INVALID_DEVICE);
        report.refused("peers of no device", driver.can_access_peer(nobody, *device), CuResult::ERROR_INVALID_DEVICE);
        report.add("a device is no peer of its own", Ok::<_, CuResult>(false), driver.can_access_peer(*device, *device));
        if let (Some(properties), Some(info)) =
            (report.works("properties", driver.device_properties(*device)), report.works("memory info", driver.memory_info(*device)))
        {
            report.add("both tell of the same memory", properties.total_bytes, info.total_bytes);
            report.add("no more is free than there is", true, info.free_bytes <= info.total_bytes);
        }
    }

    fn plain(&mut self) {
        let Self { driver, device, report } = self;
        let device = *device;
        let properties = driver.device_properties(device);
        let total = properties.as_ref().map_or(1 << 40, |properties| properties.total_bytes);
        let has_managed = properties.is_ok_and(|properties| properties.managed_memory);
        for kind in [MemoryKind::Device, MemoryKind::Managed] {
            report.refused("0 bytes", driver.mem_alloc(device, kind, 0), INVALID);
        }
        report.refused("8 times the memory", driver.mem_alloc(device, MemoryKind::Device, total.saturating_mul(8)), NO_MEMORY);
        report.refused("2^63 bytes", driver.mem_alloc(device, MemoryKind::Device, 1 << 63), NO_MEMORY);
        report.refused("2^64 - 1 bytes", driver.mem_alloc(device, MemoryKind::Device, u64::MAX), NO_MEMORY);
        report.refused("2^64 - 1 bytes, pinned", driver.mem_alloc(device, MemoryKind::Pinned, u64::MAX), NO_MEMORY);
        for kind in [MemoryKind::Device, MemoryKind::Pinned, MemoryKind::Managed] {
            report.works("freeing null", driver.mem_free(device, kind, DevicePtr::NULL));
            if kind == MemoryKind::Managed && !has_managed {
                report.refused("4 MiB of managed memory without it", driver.mem_alloc(device, kind, 4 * MIB), NOT_SUPPORTED);
                continue;
            }
            let Some(at) = report.works("4 MiB", driver.mem_alloc(device, kind, 4 * MIB)) else { continue };
            report.add("the address is aligned", true, at.is_aligned_to(256) && !at.is_null());
            report.refused("freeing 256 bytes on", driver.mem_free(device, kind, at.offset(256)), INVALID);
            report.refused("freeing 2 MiB on", driver.mem_free(device, kind, at.offset(2 * MIB)), INVALID);
            let other = if kind == MemoryKind::Pinned { MemoryKind::Device } else { MemoryKind::Pinned };
            report.refused("freeing by the other family", driver.mem_free(device, other, at), INVALID);
            report.works("freeing", driver.mem_free(device, kind, at));
            report.refused("freeing twice", driver.mem_free(device, kind, at), INVALID);
        }
        report.refused("freeing what is no memory", driver.mem_free(device, MemoryKind::Device, DevicePtr::new(0x1234_5600)), INVALID);
    }

    fn virtual_memory(&mut self) {
        let properties = HandleProperties::on(self.device);
        let Some(granularity) = self.report.works("granularity", self.driver.mem_granularity(&properties)) else { return };
        let unit = granularity.minimum_bytes;
        self.report.add("the minimum divides the recommended", 0, granularity.recommended_bytes % unit);
        self.addresses(unit);
        self.handles(unit);
        self.purposes(unit);
        self.mappings(unit);
        self.access(unit);
        self.lifetimes(unit);
        self.remapping(unit);
    }

    fn addresses(&mut self, unit: u64) {
        let Self { driver, device, report } = self;
        for (name, bytes, alignment, code) in [
            ("reserving 0", 0, 0, INVALID),
            ("reserving 1 byte", 1, 0, INVALID),
            ("reserving half a unit", unit / 2, 0, INVALID),
            ("reserving one and a half", unit + unit / 2, 0, INVALID),
            ("alignment 3", unit, 3, INVALID),
            ("alignment 3 units", unit, 3 * unit, INVALID),
            ("reserving 2^63", 1 << 63, 0, NO_MEMORY),
            ("reserving 2^64 less a unit", 0u64.wrapping_sub(unit), 0, NO_MEMORY),
        ] {
            report.refused(name, driver.mem_address_reserve(bytes, alignment), code);
        }
        for alignment in [0, 1, 256, 4096, unit, 4 * unit, 1 << 30] {
            if let Some(at) = report.works("an alignment", driver.mem_address_reserve(unit, alignment)) {
                report.add("the alignment is kept", true, at.is_aligned_to(alignment.max(unit)));
                report.works("giving the range back", driver.mem_address_free(at, unit));
            }
        }
        let Some(at) = report.works("4 units", driver.mem_address_reserve(4 * unit, 0)) else { return };
        for (name, address, bytes) in [
            ("address free: half of it", at, 2 * unit),
            ("address free: twice as much", at, 8 * unit),
            ("address free: its end", at.offset(unit), 3 * unit),
            ("address free: 0 bytes", at, 0),
            ("address free: null", DevicePtr::NULL, unit),
            ("address free: never reserved", DevicePtr::new(unit), unit),
        ] {
            report.refused(name, driver.mem_address_free(address, bytes), INVALID);
        }
        report.refused("cuMemFree of a reservation", driver.mem_free(*device, MemoryKind::Device, at), INVALID);
        report.works("address free", driver.mem_address_free(at, 4 * unit));
        report.refused("address free: twice", driver.mem_address_free(at, 4 * unit), INVALID);
        if let Some(plain) = report.works("a plain allocation", driver.mem_alloc(*device, MemoryKind::Device, 4 * unit)) {
            report.refused("address free: a plain allocation", driver.mem_address_free(plain, 4 * unit), INVALID);
            report.refused("cuMemUnmap of a plain allocation", driver.mem_unmap(plain, 4 * unit), INVALID);
            let access = [AccessDescriptor { device: *device, flags: AccessFlags::ReadWrite }];
            report.refused("access of a plain allocation", driver.mem_set_access(plain, unit, &access), INVALID);
            report.works("freeing it", driver.mem_free(*device, MemoryKind::Device, plain));
        }
    }

    fn handles(&mut self, unit: u64) {
        let Self { driver, device, report } = self;
        let properties = HandleProperties::on(*device);
        let total = driver.device_properties(*device).map_or(1 << 40, |properties| properties.total_bytes);
        for (name, bytes, code) in [
            ("a handle of 0", 0, INVALID),
            ("a handle of 1 byte", 1, INVALID),
            ("a handle of half a unit", unit / 2, INVALID),
            ("a handle of one and a half", unit + unit / 2, INVALID),
            ("a handle of 8 times the memory", total.div_ceil(unit) * unit * 8, NO_MEMORY),
            ("a handle of 2^63", 1 << 63, NO_MEMORY),
            ("a handle of 2^64 less a unit", 0u64.wrapping_sub(unit), NO_MEMORY),
        ] {
            report.refused(name, driver.mem_create(bytes, &properties), code);
        }
        let nobody = HandleProperties::on(DeviceId(driver.device_count().unwrap_or(0)));
        report.refused("a handle on no device", driver.mem_create(unit, &nobody), CuResult::ERROR_INVALID_DEVICE);
        report.refused("releasing handle 0", driver.mem_release(PhysicalHandle(0)), INVALID);
        if let Some(handle) = report.works("a handle", driver.mem_create(unit, &properties)) {
            report.works("releasing it", driver.mem_release(handle));
        }
    }

    fn mappings(&mut self, unit: u64) {
        let Self { driver, device, report } = self;
        let properties = HandleProperties::on(*device);
        let Some(at) = report.works("16 units", driver.mem_address_reserve(16 * unit, 0)) else { return };
        let one = report.works("a handle of one", driver.mem_create(unit, &properties));
        let two = report.works("a handle of two", driver.mem_create(2 * unit, &properties));
        if let (Some(one), Some(two)) = (one, two) {
            for (name, address, bytes, offset, handle, code) in [
                ("map: second half of a handle", at, unit, unit, two, NOT_SUPPORTED),
                ("map: offset and whole size", at, 2 * unit, unit, two, NOT_SUPPORTED),
                ("map: offset 1", at, unit, 1, two, NOT_SUPPORTED),
                ("map: first half of a handle", at, unit, 0, two, NOT_SUPPORTED),
                ("map: more than the handle", at, 2 * unit, 0, one, NOT_SUPPORTED),
                ("map: half a unit", at, unit / 2, 0, one, NOT_SUPPORTED),
                ("map: 0 bytes", at, 0, 0, one, INVALID),
                ("map: handle 0", at, unit, 0, PhysicalHandle(0), INVALID),
                ("map: half a unit on", at.offset(unit / 2), unit, 0, one, INVALID),
                ("map: 256 bytes on", at.offset(256), unit, 0, one, INVALID),
                ("map: null", DevicePtr::NULL, unit, 0, one, INVALID),
                ("map: no reservation", DevicePtr::new(unit), unit, 0, one, INVALID),
            ] {
                report.refused(name, driver.mem_map(address, bytes, offset, handle), code);
            }
            report.works("map", driver.mem_map(at.offset(4 * unit), unit, 0, one));
            report.refused("map: the same again", driver.mem_map(at.offset(4 * unit), unit, 0, one), INVALID);
            report.refused("map: over another's begin", driver.mem_map(at.offset(4 * unit), 2 * unit, 0, two), INVALID);
            report.refused("map: over another's end", driver.mem_map(at.offset(3 * unit), 2 * unit, 0, two), INVALID);
            report.works("map: right behind", driver.mem_map(at.offset(5 * unit), 2 * unit, 0, two));
            report.refused("map: inside another", driver.mem_map(at.offset(6 * unit), unit, 0, one), INVALID);
            report.refused("address free: mappings inside", driver.mem_address_free(at, 16 * unit), INVALID);
            for (name, address, bytes) in [
                ("unmap: first half", at.offset(5 * unit), unit),
                ("unmap: second half", at.offset(6 * unit), unit),
                ("unmap: one and a half", at.offset(4 * unit), 2 * unit),
                ("unmap: 0 bytes", at.offset(4 * unit), 0),
                ("unmap: half a unit", at.offset(4 * unit), unit / 2),
                ("unmap: half a unit on", at.offset(4 * unit + unit / 2), unit),
                ("unmap: null", DevicePtr::NULL, unit),
                ("unmap: no reservation", DevicePtr::new(unit), unit),
            ] {
                report.refused(name, driver.mem_unmap(address, bytes), INVALID);
            }
            report.refused("cuMemFree of a mapping", driver.mem_free(*device, MemoryKind::Device, at.offset(4 * unit)), INVALID);
            report.works("unmap", driver.mem_unmap(at.offset(4 * unit), unit));
            report.works("unmap the other", driver.mem_unmap(at.offset(5 * unit), 2 * unit));
        }
        for handle in [one, two].into_iter().flatten() {
            report.works("release", driver.mem_release(handle));
        }
        report.works("address free after unmap", driver.mem_address_free(at, 16 * unit));
    }

    fn access(&mut self, unit: u64) {
        let Self { driver, device, report } = self;
        let device = *device;
        let properties = HandleProperties::on(device);
        let Some(at) = report.works("8 units", driver.mem_address_reserve(8 * unit, 0)) else { return };
        let first = report.works("a handle", driver.mem_create(2 * unit, &properties));
        let second = report.works("another", driver.mem_create(2 * unit, &properties));
        if let (Some(first), Some(second)) = (first, second) {
            let to = |flags| [AccessDescriptor { device, flags }];
            let full = to(AccessFlags::ReadWrite);
            report.refused("access: nothing mapped", driver.mem_set_access(at, unit, &full), INVALID);
            report.works("map", driver.mem_map(at, 2 * unit, 0, first));
            report.works("map", driver.mem_map(at.offset(2 * unit), 2 * unit, 0, second));
            let fill = |bytes| driver.memset_d8_async(device, at, 1, bytes, StreamHandle::LEGACY);
            report.refused("filling without access", fill(16), INVALID);
            for (name, address, bytes) in [
                ("access: mapping and hole", at.offset(2 * unit), 4 * unit),
                ("access: first half", at, unit),
                ("access: second half", at.offset(unit), unit),
                ("access: one and a half", at, 3 * unit),
                ("access: 0 bytes", at, 0),
                ("access: half a unit on", at.offset(unit / 2), unit),
            ] {
                report.refused(name, driver.mem_set_access(address, bytes, &full), INVALID);
            }
            report.refused("access: for nobody", driver.mem_set_access(at, 2 * unit, &[]), INVALID);
            let nobody = [AccessDescriptor { device: DeviceId(driver.device_count().unwrap_or(0)), flags: AccessFlags::ReadWrite }];
            report.refused("access: for no device", driver.mem_set_access(at, 2 * unit, &nobody), INVALID);
            report.works("access: one mapping", driver.mem_set_access(at, 2 * unit, &full));
            report.refused("filling past what has access", fill(3 * unit), INVALID);
            report.works("access: both mappings", driver.mem_set_access(at, 4 * unit, &full));
            report.works("filling both", fill(4 * unit));
            report.refused("filling past the mappings", fill(5 * unit), INVALID);
            report.works("the context is sound", driver.context_synchronize(device));
            report.works("access: reading only", driver.mem_set_access(at, 2 * unit, &to(AccessFlags::Read)));
            report.works("access: twice for a device", driver.mem_set_access(at, 2 * unit, &[full[0], to(AccessFlags::Read)[0]]));
            report.works("access: none", driver.mem_set_access(at, 4 * unit, &to(AccessFlags::None)));
            report.refused("filling where access was taken", fill(16), INVALID);
            report.works("access: back", driver.mem_set_access(at, 2 * unit, &full));
            report.works("unmap", driver.mem_unmap(at, 2 * unit));
            report.refused("filling what was unmapped", fill(16), INVALID);
            report.works("mapping anew", driver.mem_map(at, 2 * unit, 0, first));
            report.refused("a fresh mapping has no access", fill(16), INVALID);
            report.works("unmap", driver.mem_unmap(at, 2 * unit));
            report.works("unmap", driver.mem_unmap(at.offset(2 * unit), 2 * unit));
        }
        for handle in [first, second].into_iter().flatten() {
            report.works("release", driver.mem_release(handle));
        }
        report.works("address free", driver.mem_address_free(at, 8 * unit));
    }

    fn lifetimes(&mut self, unit: u64) {
        let Self { driver, device, report } = self;
        let device = *device;
        let free = || driver.memory_info(device).map(|info| info.free_bytes);
        let bytes = 8 * unit;
        let Some(at) = report.works("16 units", driver.mem_address_reserve(2 * bytes, 0)) else { return };
        let before = free();
        if let Some(handle) = report.works("a handle", driver.mem_create(bytes, &HandleProperties::on(device))) {
            report.add("its memory is taken", before.map(|free| free - bytes), free());
            report.works("map", driver.mem_map(at, bytes, 0, handle));
            report.works("map at a second address", driver.mem_map(at.offset(bytes), bytes, 0, handle));
            report.works("release while mapped", driver.mem_release(handle));
            report.add("its memory stays taken", before.map(|free| free - bytes), free());
            let access = [AccessDescriptor { device, flags: AccessFlags::ReadWrite }];
            report.works("access after release", driver.mem_set_access(at, bytes, &access));
            report.works("filling after release", driver.memset_d8_async(device, at, 1, bytes, StreamHandle::LEGACY));
            report.works("which is done", driver.context_synchronize(device));
            report.works("unmap", driver.mem_unmap(at, bytes));
            report.add("its memory stays taken while mapped once", before.map(|free| free - bytes), free());
            report.works("unmap the second", driver.mem_unmap(at.offset(bytes), bytes));
            report.add("its memory is free again", before, free());
        }
        report.works("address free", driver.mem_address_free(at, 2 * bytes));
    }

    /// Bytes move with their handle. Only where there are bytes.
    fn remapping(&mut self, unit: u64) {
        if !self.has_bytes() {
            return;
        }
        let Self { driver, device, report } = self;
        let device = *device;
        let access = [AccessDescriptor { device, flags: AccessFlags::ReadWrite }];
        let Some(at) = report.works("4 units", driver.mem_address_reserve(4 * unit, 0)) else { return };
        if let Some(handle) = report.works("a handle", driver.mem_create(unit, &HandleProperties::on(device))) {
            report.works("map", driver.mem_map(at, unit, 0, handle));
            report.works("access", driver.mem_set_access(at, unit, &access));
            report.works("fill", driver.memset_d8_async(device, at, 0x5a, unit, StreamHandle::LEGACY));
            report.works("write its last bytes", driver.memcpy_host_to_device(device, at.offset(unit - 4), &[1, 2, 3, 4]));
            report.works("unmap", driver.mem_unmap(at, unit));
            for place in [unit, 3 * unit] {
                report.works("map elsewhere", driver.mem_map(at.offset(place), unit, 0, handle));
                report.works("access", driver.mem_set_access(at.offset(place), unit, &access));
                let mut read = [0; 8];
                report.works("read", driver.memcpy_device_to_host(device, &mut read, at.offset(place + unit - 8)));
                report.add("the bytes came along", [0x5a, 0x5a, 0x5a, 0x5a, 1, 2, 3, 4], read);
            }
            let mut read = [0];
            report.works("write by one address", driver.memcpy_host_to_device(device, at.offset(unit), &[9]));
            report.works("read by the other", driver.memcpy_device_to_host(device, &mut read, at.offset(3 * unit)));
            report.add("both show the same", [9], read);
            report.works("unmap", driver.mem_unmap(at.offset(unit), unit));
            report.works("unmap", driver.mem_unmap(at.offset(3 * unit), unit));
            report.works("release", driver.mem_release(handle));
        }
        report.works("address free", driver.mem_address_free(at, 4 * unit));
    }

    /// Whether bytes can be read back: not from a simulated device of addresses alone.
    fn has_bytes(&self) -> bool {
        let Ok(at) = self.driver.mem_alloc(self.device, MemoryKind::Device, 256) else { return false };
        let answer = self.driver.memcpy_device_to_host(self.device, &mut [0], at);
        _ = self.driver.mem_free(self.device, MemoryKind::Device, at);
        answer.is_ok()
    }

    fn streams(&mut self) {
        let Self { driver, device, report } = self;
        let device = *device;
        for handle in [StreamHandle::DEFAULT, StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
            report.refused("destroying a default stream", driver.stream_destroy(handle), BAD_HANDLE);
            report.works("synchronizing a default stream", driver.stream_synchronize(device, handle));
            report.add("it is done then", Ok::<_, CuResult>(true), driver.stream_query(device, handle));
        }
        let id = |stream| driver.stream_id(device, stream);
        report.add("stream 0 is the legacy stream", id(StreamHandle::LEGACY), id(StreamHandle::DEFAULT));
        let has_ids = driver.device_properties(device).is_ok_and(|properties| properties.stream_ids);
        report.add("the per-thread stream is not", has_ids, id(StreamHandle::LEGACY) != id(StreamHandle::PER_THREAD));
        let no_event = super::EventHandle(0);
        report.refused("querying event 0", driver.event_query(no_event), BAD_HANDLE);
        report.refused("destroying event 0", driver.event_destroy(no_event), BAD_HANDLE);
        report.refused("recording event 0", driver.event_record(device, no_event, StreamHandle::LEGACY), BAD_HANDLE);
        let mut ids = Vec::new();
        for flags in [StreamFlags::Blocking, StreamFlags::NonBlocking] {
            let Some(stream) = report.works("a stream", driver.stream_create(device, flags)) else { continue };
            ids.push(id(stream));
            report.add("nothing is captured", Ok::<_, CuResult>(CaptureStatus::None), driver.stream_capture_status(device, stream));
            if let Some(event) = report.works("an event", driver.event_create(device)) {
                report.add("an event never recorded is done", Ok::<_, CuResult>(true), driver.event_query(event));
                report.works("synchronizing with it", driver.event_synchronize(event));
                report.works("a wait for it", driver.stream_wait_event(device, stream, event));
                let ran = Arc::new(AtomicU64::new(0));
                let counter = Arc::clone(&ran);
                let count = Box::new(move || _ = counter.fetch_add(1, Ordering::SeqCst));
                report.works("a host function", driver.launch_host_function(device, stream, count));
                report.works("recording", driver.event_record(device, event, stream));
                report.works("synchronizing with the event", driver.event_synchronize(event));
                report.add("the host function before it ran", 1, ran.load(Ordering::SeqCst));
                report.add("the event is done", Ok::<_, CuResult>(true), driver.event_query(event));
                report.works("another stream's wait", driver.stream_wait_event(device, StreamHandle::PER_THREAD, event));
                report.works("destroying the event", driver.event_destroy(event));
            }
            report.works("synchronizing the stream", driver.stream_synchronize(device, stream));
            report.add("the stream is done", Ok::<_, CuResult>(true), driver.stream_query(device, stream));
            report.works("destroying the stream", driver.stream_destroy(stream));
        }
        report.add("a stream's id is its own", true, ids.len() == 2 && (ids[0].is_err() || ids[0] != ids[1]));
        report.works("synchronizing the context", driver.context_synchronize(device));
        let mode = driver.thread_exchange_capture_mode(CaptureMode::Relaxed);
        report.add("the capture mode at first", Ok::<_, CuResult>(CaptureMode::Global), mode);
        let mode = driver.thread_exchange_capture_mode(CaptureMode::Global);
        report.add("the capture mode set", Ok::<_, CuResult>(CaptureMode::Relaxed), mode);
    }

    fn work(&mut self) {
        use KernelArgument::{Pointer, U32, U64};
        let has_bytes = self.has_bytes();
        let Self { driver, device, report } = self;
        let device = *device;
        let stream = StreamHandle::LEGACY;
        report.refused("loading no module", driver.module_load(device, b"garbage\0"), CuResult::ERROR_INVALID_IMAGE);
        let nonsense = b".version 6.4\n.target sm_60\n.address_size 64\nnonsense;\0";
        report.refused("loading nonsense", driver.module_load(device, nonsense), CuResult::ERROR_INVALID_PTX);
        let image = format!("{BUILTIN_MODULE}\0");
        let Some(module) = report.works("loading a module", driver.module_load(device, image.as_bytes())) else { return };
        report.refused("a kernel it lacks", driver.module_function(module, "nothing"), CuResult::ERROR_NOT_FOUND);
        let kernels = ["fill", "check", "copy", "spin"].map(|name| report.works("a kernel", driver.module_function(module, name)));
        let memory = report.works("memory", driver.mem_alloc(device, MemoryKind::Device, MIB));
        if let ([Some(fill), Some(check), Some(copy), Some(spin)], Some(at)) = (kernels, memory) {
            for (name, grid, block, shared_bytes) in [
                ("a launch of no threads", [1, 1, 1], [0, 1, 1], 0),
                ("a launch of no blocks", [0, 1, 1], [1, 1, 1], 0),
                ("a launch of 2048 threads", [1, 1, 1], [2048, 1, 1], 0),
                ("a launch with 1 MiB of shared memory", [1, 1, 1], [1, 1, 1], 1 << 20),
            ] {
                let config = LaunchConfig { grid, block, shared_bytes };
                report.refused(name, driver.launch_kernel(device, spin, config, stream, &[U64(1)]), INVALID);
            }
            for (name, bytes) in [("filling 0 bytes", 0), ("filling", 16)] {
                report.works(name, driver.memset_d8_async(device, at, 0, bytes, stream));
            }
            report.works("filling 0 bytes of null", driver.memset_d8_async(device, DevicePtr::NULL, 0, 0, stream));
            report.works("copying 0 bytes", driver.memcpy_async(device, DevicePtr::NULL, at, 0, stream));
            report.refused("filling null", driver.memset_d8_async(device, DevicePtr::NULL, 0, 16, stream), INVALID);
            report.refused("filling past the end", driver.memset_d8_async(device, at.offset(MIB - 8), 0, 2 * MIB, stream), INVALID);
            report.refused("copying past the end", driver.memcpy_async(device, at.offset(MIB - 8), at, 2 * MIB, stream), INVALID);
            let words = 1 << 16;
            let counter = at.offset(MIB / 2);
            let second = at.offset(MIB / 2 + 4096);
            report.works("zeroing", driver.memset_d8_async(device, at, 0, MIB, stream));
            report.works("fill", driver.launch_kernel(device, fill, SHAPE, stream, &[Pointer(at), U64(words), U32(7)]));
            report.works("copy", driver.launch_kernel(device, copy, SHAPE, stream, &[Pointer(second), Pointer(at), U64(words)]));
            report.works(
                "check",
                driver.launch_kernel(device, check, SHAPE, stream, &[Pointer(second), U64(words / 4), U32(7), Pointer(counter)]),
            );
            report.works("spin", driver.launch_kernel(device, spin, SHAPE, stream, &[U64(1000)]));
            report.works("all of it is done", driver.stream_synchronize(device, stream));
            if has_bytes {
                let mut count = [1; 8];
                report.works("read", driver.memcpy_device_to_host(device, &mut count, counter));
                report.add("what was filled and copied is right", 0, u64::from_le_bytes(count));
                let wrong = [Pointer(at), U64(words), U32(8), Pointer(counter)];
                report.works("check of another seed", driver.launch_kernel(device, check, SHAPE, stream, &wrong));
                report.works("read", driver.memcpy_device_to_host(device, &mut count, counter));
                let differ = (0..words).filter(|&index| pattern(7, index) != pattern(8, index)).count() as u64;
                report.add("what differs is found", differ, u64::from_le_bytes(count));
                report.works("copy between addresses", driver.memcpy_async(device, second, at.offset(4), 8, stream));
                let mut read = [0; 8];
                report.works("read", driver.memcpy_device_to_host(device, &mut read, second));
                let expected = [pattern(7, 1).to_le_bytes(), pattern(7, 2).to_le_bytes()].concat();
                report.add("the copy is right", expected, read.to_vec());
            }
        }
        if let Some(at) = memory {
            report.works("free", driver.mem_free(device, MemoryKind::Device, at));
        }
        report.works("unloading", driver.module_unload(device, module));
    }

    /// What needs a second device.
    fn other_device(&mut self) {
        let Self { driver, device, report } = self;
        let device = *device;
        let Some(other) = (0..driver.device_count().unwrap_or(0)).map(DeviceId).find(|&other| other != device) else { return };
        if let Some(event) = report.works("an event", driver.event_create(device)) {
            if let Some(stream) = report.works("another device's stream", driver.stream_create(other, StreamFlags::NonBlocking)) {
                report.refused("recording on it", driver.event_record(other, event, stream), BAD_HANDLE);
                report.works("waiting on it", driver.stream_wait_event(other, stream, event));
                report.works("destroying it", driver.stream_destroy(stream));
            }
            let legacy = StreamHandle::LEGACY;
            report.refused("recording on its default stream", driver.event_record(other, event, legacy), BAD_HANDLE);
            report.works("destroying the event", driver.event_destroy(event));
        }
        let image = format!("{BUILTIN_MODULE}\0");
        if let Some(module) = report.works("a module", driver.module_load(device, image.as_bytes())) {
            if let Some(spin) = report.works("a kernel", driver.module_function(module, "spin")) {
                let launch = driver.launch_kernel(other, spin, SHAPE, StreamHandle::LEGACY, &[KernelArgument::U64(1)]);
                report.refused("launching it on another device", launch, BAD_HANDLE);
            }
            report.works("unloading", driver.module_unload(device, module));
        }
    }

    fn broken(&mut self) {
        const CODE: CuResult = CuResult::ERROR_ILLEGAL_ADDRESS;
        let Self { driver, device, report } = self;
        let device = *device;
        let properties = HandleProperties::on(device);
        let Some(granularity) = report.works("granularity", driver.mem_granularity(&properties)) else { return };
        let unit = granularity.minimum_bytes;
        let image = format!("{BUILTIN_MODULE}\0");
        let Some(module) = report.works("a module", driver.module_load(device, image.as_bytes())) else { return };
        let Some(fill) = report.works("a kernel", driver.module_function(module, "fill")) else { return };
        let Some(at) = report.works("addresses", driver.mem_address_reserve(4 * unit, 0)) else { return };
        let Some(handle) = report.works("a handle", driver.mem_create(unit, &properties)) else { return };
        report.works("map", driver.mem_map(at, unit, 0, handle));
        let arguments = [KernelArgument::Pointer(at), KernelArgument::U64(16), KernelArgument::U32(1)];
        let stream = StreamHandle::LEGACY;
        report.works("a kernel that writes without access", driver.launch_kernel(device, fill, SHAPE, stream, &arguments));
        report.refused("its failure shows", driver.context_synchronize(device), CODE);
        report.refused("synchronize", driver.context_synchronize(device), CODE);
        report.refused("memory info", driver.memory_info(device), CODE);
        for kind in [MemoryKind::Device, MemoryKind::Pinned, MemoryKind::Managed] {
            report.refused("allocate", driver.mem_alloc(device, kind, MIB), CODE);
        }
        report.refused("stream id", driver.stream_id(device, stream), CODE);
        report.refused("capture status", driver.stream_capture_status(device, stream), CODE);
        report.refused("stream query", driver.stream_query(device, stream), CODE);
        report.refused("stream create", driver.stream_create(device, StreamFlags::NonBlocking), CODE);
        report.refused("event create", driver.event_create(device), CODE);
        report.refused("launch", driver.launch_kernel(device, fill, SHAPE, stream, &arguments), CODE);
        report.refused("host function", driver.launch_host_function(device, stream, Box::new(|| {})), CODE);
        report.refused("module unload", driver.module_unload(device, module), CODE);
        // Virtual memory management goes on: it belongs to no context.
        let access = [AccessDescriptor { device, flags: AccessFlags::ReadWrite }];
        report.works("access", driver.mem_set_access(at, unit, &access));
        report.works("unmap", driver.mem_unmap(at, unit));
        report.works("map", driver.mem_map(at.offset(unit), unit, 0, handle));
        report.works("unmap", driver.mem_unmap(at.offset(unit), unit));
        report.works("release", driver.mem_release(handle));
        report.works("address free", driver.mem_address_free(at, 4 * unit));
        if let Some(again) = report.works("a new handle", driver.mem_create(unit, &properties)) {
            report.works("release", driver.mem_release(again));
        }
        report.works("the version", driver.version());
        report.works("the number of devices", driver.device_count());
        report.works("properties", driver.device_properties(device));
        report.works("the capture mode", driver.thread_exchange_capture_mode(CaptureMode::Global));
    }
}

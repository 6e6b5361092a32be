//! Plain memory.

use crate::entry::{Answer, Out, exports, put};
use crate::state::Fake;
use std::ffi::{c_int, c_uint};
use vrampool::driver::{Driver, MemoryKind, StreamHandle};
use vrampool::error::CuResult;
use vrampool::units::DevicePtr;

const ATTACH_GLOBAL: c_uint = 1;
const ATTACH_HOST: c_uint = 2;
/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
const RELEASE_THRESHOLD: c_int = 4;
/// Where the values of devices' default pools begin.
const FIRST_POOL: u64 = 0x5a00_0000_1000;

fn allocate(fake: &Fake, address: Out<'_, u64>, kind: MemoryKind, bytes: usize) -> Answer {
    let device = fake.current()?;
    let address = address.ok_or(CuResult::ERROR_INVALID_VALUE)?;
    let at = fake.sim.mem_alloc(device, kind, bytes as u64)?;
    if !at.is_null() {
        fake.tables().plain.insert(at.address(), (device, kind));
    }
    address.write(at.address());
    Ok(())
}

/// Frees what is of one of the kinds, in the context that it is in.
fn free(fake: &Fake, address: u64, kinds: &[MemoryKind]) -> Answer {
    if address == 0 {
        return Ok(());
    }
    let found = fake.tables().plain.remove(&address);
    let (device, kind) = found.ok_or(CuResult::ERROR_INVALID_VALUE)?;
    let freed =
        if kinds.contains(&kind) { fake.sim.mem_free(device, kind, DevicePtr::new(address)) } else { Err(CuResult::ERROR_INVALID_VALUE) };
    if freed.is_err() {
        fake.tables().plain.insert(address, (device, kind));
    }
    freed
}

exports! {
    #[unsafe(no_mangle)]
    3020 init cuMemAlloc_v2(address: Out<'_, u64>, bytes: usize) |fake| {
        allocate(fake, address, MemoryKind::Device, bytes)
    }

    #[unsafe(no_mangle)]
    3020 init cuMemFree_v2(address: u64) |fake| {
        free(fake, address, &[MemoryKind::Device, MemoryKind::Managed])
    }

    #[unsafe(no_mangle)]
    4000 init cuMemAllocHost_v2(address: Out<'_, u64>, bytes: usize) |fake| {
        allocate(fake, address, MemoryKind::Pinned, bytes)
    }

    #[unsafe(no_mangle)]
    2000 init cuMemFreeHost(address: u64) |fake| {
        free(fake, address, &[MemoryKind::Pinned])
    }

    #[unsafe(no_mangle)]
    6000 init cuMemAllocManaged(address: Out<'_, u64>, bytes: usize, flags: c_uint) |fake| {
        if flags != ATTACH_GLOBAL && flags != ATTACH_HOST {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        allocate(fake, address, MemoryKind::Managed, bytes)
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    11020 init cuMemAllocAsync(address: Out<'_, u64>, bytes: usize, stream: u64) |fake| {
        let stream = StreamHandle(stream);
        let device = fake.device_of_stream(stream)?;
        let address = address.ok_or(CuResult::ERROR_INVALID_VALUE)?;
        address.write(fake.sim.mem_alloc_async(device, bytes as u64, stream)?.address());
        Ok(())
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    11020 init cuMemFreeAsync(address: u64, stream: u64) |fake| {
        let stream = StreamHandle(stream);
        fake.sim.mem_free_async(fake.device_of_stream(stream)?, DevicePtr::new(address), stream)
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    11020 init cuDeviceGetDefaultMemPool(pool: Out<'_, u64>, device: c_int) |fake| {
        let device = fake.device(device)?;
        fake.sim.mem_pool_threshold(device, 0)?;
        put(pool, FIRST_POOL + u64::from(device.0))
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    11020 init cuMemPoolSetAttribute(pool: u64, attribute: c_int, value: Option<&u64>) |fake| {
        let device = pool.checked_sub(FIRST_POOL).and_then(|index| fake.device(i32::try_from(index).ok()?).ok());
        let value = value.filter(|_| attribute == RELEASE_THRESHOLD).ok_or(CuResult::ERROR_INVALID_VALUE)?;
        fake.sim.mem_pool_threshold(device.ok_or(CuResult::ERROR_INVALID_VALUE)?, *value)
    }
}

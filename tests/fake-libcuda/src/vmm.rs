//! Virtual memory management.

use crate::entry::{Out, exports, put};
use crate::state::Fake;
use std::ffi::{c_int, c_uchar, c_ulonglong, c_ushort, c_void};
use vrampool::driver::{AccessDescriptor, AccessFlags, Driver, HandleProperties, HandleTypes, PhysicalHandle};
use vrampool::error::CuResult;
use vrampool::units::DevicePtr;

/// `CUmemLocation`.
#[repr(C)]
pub(crate) struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub(crate) struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    windows_metadata: *mut c_void,
    compression: c_uchar,
    rdma_capable: c_uchar,
    usage: c_ushort,
    reserved: [c_uchar; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(crate) struct Access {
    location: Location,
    flags: c_int,
}

const _: () = assert!(size_of::<AllocationProperties>() == 32 && size_of::<Access>() == 12);

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: c_int = 1;

fn properties(fake: &Fake, given: Option<&AllocationProperties>) -> Result<HandleProperties, CuResult> {
    let given = given.ok_or(CuResult::ERROR_INVALID_VALUE)?;
    let plain = given.kind == PINNED && given.location.kind == ON_DEVICE;
    let flags = given.compression <= 1 && given.rdma_capable <= 1 && given.usage == 0 && given.reserved == [0; 4];
    if !plain || !flags || !given.windows_metadata.is_null() {
        return Err(CuResult::ERROR_INVALID_VALUE);
    }
    let mut properties = HandleProperties::on(fake.device(given.location.id)?);
    properties.rdma = given.rdma_capable == 1;
    properties.shareable = HandleTypes::from_bits(given.handle_types.cast_unsigned());
    Ok(properties)
}

fn no_flags(flags: c_ulonglong) -> Result<(), CuResult> {
    if flags == 0 { Ok(()) } else { Err(CuResult::ERROR_INVALID_VALUE) }
}

exports! {
    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    10020 init cuMemAddressReserve(address: Out<'_, u64>, bytes: usize, alignment: usize, _hint: u64, flags: c_ulonglong) |fake| {
        no_flags(flags)?;
        let address = address.ok_or(CuResult::ERROR_INVALID_VALUE)?;
        address.write(fake.sim.mem_address_reserve(bytes as u64, alignment as u64)?.address());
        Ok(())
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    10020 init cuMemAddressFree(address: u64, bytes: usize) |fake| {
        fake.sim.mem_address_free(DevicePtr::new(address), bytes as u64)
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    10020 init cuMemCreate(handle: Out<'_, u64>, bytes: usize, given: Option<&AllocationProperties>, flags: c_ulonglong) |fake| {
        no_flags(flags)?;
        let handle = handle.ok_or(CuResult::ERROR_INVALID_VALUE)?;
        handle.write(fake.sim.mem_create(bytes as u64, &properties(fake, given)?)?.0);
        Ok(())
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    10020 init cuMemRelease(handle: u64) |fake| {
        fake.sim.mem_release(PhysicalHandle(handle))
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    10020 init cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) |fake| {
        no_flags(flags)?;
        fake.sim.mem_map(DevicePtr::new(address), bytes as u64, offset as u64, PhysicalHandle(handle))
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    10020 init cuMemUnmap(address: u64, bytes: usize) |fake| {
        fake.sim.mem_unmap(DevicePtr::new(address), bytes as u64)
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    10020 init cuMemSetAccess(address: u64, bytes: usize, access: *const Access, count: usize) |fake| {
        if access.is_null() || count > 1 << 10 {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller passes `count` descriptors (cuMemSetAccess).
        let given = unsafe { std::slice::from_raw_parts(access, count) };
        let mut access = Vec::new();
        for Access { location, flags } in given {
            let flags = match flags {
                0 => AccessFlags::None,
                1 => AccessFlags::Read,
                3 => AccessFlags::ReadWrite,
                _ => return Err(CuResult::ERROR_INVALID_VALUE),
            };
            if location.kind != ON_DEVICE {
                return Err(CuResult::ERROR_INVALID_VALUE);
            }
            let device = fake.device(location.id).map_err(|_| CuResult::ERROR_INVALID_VALUE)?;
            access.push(AccessDescriptor { device, flags });
        }
        fake.sim.mem_set_access(DevicePtr::new(address), bytes as u64, &access)
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    10020 init cuMemGetAllocationGranularity(bytes: Out<'_, usize>, given: Option<&AllocationProperties>, option: c_int) |fake| {
        let granularity = fake.sim.mem_granularity(&properties(fake, given)?)?;
        put(bytes, match option {
            0 => granularity.minimum_bytes,
            1 => granularity.recommended_bytes,
            _ => return Err(CuResult::ERROR_INVALID_VALUE),
        } as usize)
    }
}

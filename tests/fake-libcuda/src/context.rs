//! The driver, devices and contexts.

use crate::entry::{Out, exports, put};
use crate::state::{context_of, initialize, with_stack};
use std::ffi::{c_char, c_int, c_uint};
use std::mem::MaybeUninit;
use vrampool::driver::{Driver, HandleTypes, MemoryInfo};
use vrampool::error::CuResult;

const MAX_THREADS_PER_BLOCK: c_int = 1;
const INTEGRATED: c_int = 18;
const UNIFIED_ADDRESSING: c_int = 41;
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
const MANAGED_MEMORY: c_int = 83;
const CONCURRENT_MANAGED_ACCESS: c_int = 89;
const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_int = 102;
const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: c_int = 103;
const GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: c_int = 110;
const MEMORY_POOLS_SUPPORTED: c_int = 115;
const HANDLE_TYPE_FABRIC_SUPPORTED: c_int = 128;

/// The attributes that some version of CUDA brought, and that a driver before it refuses.
fn attribute_since(attribute: c_int) -> c_int {
    match attribute {
        VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED | HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED => 10_020,
        GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED => 11_000,
        MEMORY_POOLS_SUPPORTED => 11_020,
        HANDLE_TYPE_FABRIC_SUPPORTED => 12_030,
        _ => 0,
    }
}

exports! {
    #[unsafe(no_mangle)]
    2000 always cuInit(flags: c_uint) |fake| {
        if flags != 0 {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        initialize(fake)
    }

    #[unsafe(no_mangle)]
    2020 always cuDriverGetVersion(version: Out<'_, c_int>) |fake| {
        put(version, fake.profile.sim.version)
    }

    #[unsafe(no_mangle)]
    2000 init cuDeviceGet(device: Out<'_, c_int>, ordinal: c_int) |fake| {
        fake.device(ordinal)?;
        put(device, ordinal)
    }

    #[unsafe(no_mangle)]
    2000 init cuDeviceGetCount(count: Out<'_, c_int>) |fake| {
        put(count, fake.sim.device_count()? as c_int)
    }

    #[unsafe(no_mangle)]
    2000 init cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) |fake| {
        let properties = fake.sim.device_properties(fake.device(device)?)?;
        if name.is_null() || length <= 0 {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        let bytes = properties.name.as_bytes();
        let kept = bytes.len().min(length as usize - 1);
        for (index, &byte) in bytes[..kept].iter().chain(&[0]).enumerate() {
            // SAFETY: the caller passes a buffer of `length` bytes (cuDeviceGetName), and no more are written.
            unsafe { name.add(index).write(byte as c_char) };
        }
        Ok(())
    }

    #[unsafe(no_mangle)]
    3020 init cuDeviceTotalMem_v2(bytes: Out<'_, usize>, device: c_int) |fake| {
        put(bytes, fake.sim.device_properties(fake.device(device)?)?.total_bytes as usize)
    }

    #[unsafe(no_mangle)]
    2000 init cuDeviceGetAttribute(value: Out<'_, c_int>, attribute: c_int, device: c_int) |fake| {
        let properties = fake.sim.device_properties(fake.device(device)?)?;
        if fake.profile.sim.version < attribute_since(attribute) {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        put(value, match attribute {
            MAX_THREADS_PER_BLOCK => 1024,
            INTEGRATED => properties.integrated.into(),
            UNIFIED_ADDRESSING => 1,
            COMPUTE_CAPABILITY_MAJOR => properties.compute_capability.0 as c_int,
            COMPUTE_CAPABILITY_MINOR => properties.compute_capability.1 as c_int,
            MANAGED_MEMORY | CONCURRENT_MANAGED_ACCESS => properties.managed_memory.into(),
            VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED => properties.virtual_memory_management.into(),
            HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED => properties.shareable.contains(HandleTypes::FILE_DESCRIPTOR).into(),
            HANDLE_TYPE_FABRIC_SUPPORTED => properties.shareable.contains(HandleTypes::FABRIC).into(),
            GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED => properties.rdma.into(),
            MEMORY_POOLS_SUPPORTED => properties.memory_pools.into(),
            _ => return Err(CuResult::ERROR_INVALID_VALUE),
        })
    }

    #[unsafe(no_mangle)]
    4000 init cuDeviceCanAccessPeer(answer: Out<'_, c_int>, device: c_int, peer: c_int) |fake| {
        put(answer, fake.sim.can_access_peer(fake.device(device)?, fake.device(peer)?)?.into())
    }

    #[unsafe(no_mangle)]
    7000 init cuDevicePrimaryCtxRetain(context: Out<'_, u64>, device: c_int) |fake| {
        let device = fake.device(device)?;
        let context = context.ok_or(CuResult::ERROR_INVALID_VALUE)?;
        context.write(fake.retain(device));
        Ok(())
    }

    #[unsafe(no_mangle)]
    7000 init cuDevicePrimaryCtxRelease(device: c_int) |fake| {
        fake.release(fake.device(device)?)
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    11000 init cuDevicePrimaryCtxRelease_v2(device: c_int) |fake| {
        fake.release(fake.device(device)?)
    }

    #[unsafe(no_mangle)]
    4000 init cuCtxGetCurrent(context: Out<'_, u64>) |_| {
        put(context, with_stack(|stack| stack.last().map_or(0, |&device| context_of(device)))?)
    }

    #[unsafe(no_mangle)]
    4000 init cuCtxSetCurrent(context: u64) |fake| {
        if context == 0 {
            return with_stack(|stack| _ = stack.pop());
        }
        let device = fake.device_of_context(context)?;
        with_stack(|stack| {
            stack.pop();
            stack.push(device);
        })
    }

    #[unsafe(no_mangle)]
    4000 init cuCtxPushCurrent_v2(context: u64) |fake| {
        if context == 0 {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        let device = fake.device_of_context(context)?;
        with_stack(|stack| stack.push(device))
    }

    #[unsafe(no_mangle)]
    4000 init cuCtxPopCurrent_v2(context: Out<'_, u64>) |_| {
        let device = with_stack(Vec::pop)?.ok_or(CuResult::ERROR_INVALID_CONTEXT)?;
        context.map(|context: &mut MaybeUninit<u64>| context.write(context_of(device)));
        Ok(())
    }

    #[unsafe(no_mangle)]
    2000 init cuCtxGetDevice(device: Out<'_, c_int>) |fake| {
        put(device, fake.current()?.0 as c_int)
    }

    #[unsafe(no_mangle)]
    2000 init cuCtxSynchronize() |fake| {
        fake.sim.context_synchronize(fake.current()?)
    }

    #[unsafe(no_mangle)]
    3020 init cuMemGetInfo_v2(free: Out<'_, usize>, total: Out<'_, usize>) |fake| {
        let MemoryInfo { free_bytes, total_bytes } = fake.sim.memory_info(fake.current()?)?;
        let (free, total) = free.zip(total).ok_or(CuResult::ERROR_INVALID_VALUE)?;
        free.write((free_bytes + fake.profile.withheld_bytes) as usize);
        total.write(total_bytes as usize);
        Ok(())
    }
}

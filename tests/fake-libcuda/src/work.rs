//! Copies, fills, modules and kernels.

use crate::entry::{Answer, Out, exports};
use crate::state::Fake;
use std::ffi::{CStr, c_char, c_uchar, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use vrampool::driver::kernels::pattern;
use vrampool::driver::{Driver, FunctionHandle, KernelArgument, LaunchConfig, ModuleHandle, StreamHandle};
use vrampool::error::CuResult;
use vrampool::units::{DeviceId, DevicePtr};

/// What a parameter of a kernel is.
#[derive(Clone, Copy)]
enum Parameter {
    Pointer,
    U32,
    U64,
}

/// The parameters of the kernels that the simulated device has.
fn parameters(kernel: &str) -> &'static [Parameter] {
    use Parameter::{Pointer, U32, U64};
    match kernel {
        "fill" => &[Pointer, U64, U32],
        "check" => &[Pointer, U64, U32, Pointer],
        "copy" => &[Pointer, Pointer, U64],
        "spin" => &[U64],
        _ => &[],
    }
}

/// Has the fill that the profile names come out wrong in its first byte.
fn spoil(fake: &Fake, device: DeviceId, to: DevicePtr, seed: u32, stream: StreamHandle) -> Answer {
    static FILLS: AtomicU32 = AtomicU32::new(0);
    if fake.profile.spoiled_fill != Some(FILLS.fetch_add(1, Ordering::SeqCst)) {
        return Ok(());
    }
    fake.sim.memset_d8_async(device, to, !pattern(seed, 0).to_le_bytes()[0], 1, stream)
}

exports! {
    #[unsafe(no_mangle)]
    4000 init cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: u64) |fake| {
        let stream = StreamHandle(stream);
        let device = fake.device_of_stream(stream)?;
        fake.sim.memcpy_async(device, DevicePtr::new(to), DevicePtr::new(from), bytes as u64, stream)
    }

    #[unsafe(no_mangle)]
    3020 init cuMemcpyHtoD_v2(to: u64, from: *const u8, bytes: usize) |fake| {
        let device = fake.current()?;
        if from.is_null() && bytes > 0 {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller passes `bytes` bytes of host memory (cuMemcpyHtoD).
        let from = if bytes == 0 { &[] } else { unsafe { std::slice::from_raw_parts(from, bytes) } };
        fake.sim.memcpy_host_to_device(device, DevicePtr::new(to), from)
    }

    #[unsafe(no_mangle)]
    3020 init cuMemcpyDtoH_v2(to: *mut u8, from: u64, bytes: usize) |fake| {
        let device = fake.current()?;
        if to.is_null() && bytes > 0 {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller passes room for `bytes` bytes, of its own (cuMemcpyDtoH).
        let to = if bytes == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(to, bytes) } };
        fake.sim.memcpy_device_to_host(device, to, DevicePtr::new(from))
    }

    #[unsafe(no_mangle)]
    3020 init cuMemsetD8Async(address: u64, value: c_uchar, bytes: usize, stream: u64) |fake| {
        let stream = StreamHandle(stream);
        fake.sim.memset_d8_async(fake.device_of_stream(stream)?, DevicePtr::new(address), value, bytes as u64, stream)
    }

    #[unsafe(no_mangle)]
    2000 init cuModuleLoadData(module: Out<'_, u64>, image: *const c_char) |fake| {
        let device = fake.current()?;
        let module = module.filter(|_| !image.is_null()).ok_or(CuResult::ERROR_INVALID_VALUE)?;
        // SAFETY: the caller passes text that a zero byte ends, or an image of binary code (cuModuleLoadData), whose
        // header holds a zero byte.
        let image = unsafe { CStr::from_ptr(image) };
        let made = fake.sim.module_load(device, image.to_bytes_with_nul())?;
        fake.tables().modules.insert(made.0, device);
        module.write(made.0);
        Ok(())
    }

    #[unsafe(no_mangle)]
    2000 init cuModuleUnload(module: u64) |fake| {
        let device = fake.tables().modules.remove(&module).ok_or(CuResult::ERROR_INVALID_HANDLE)?;
        let unloaded = fake.sim.module_unload(device, ModuleHandle(module));
        let mut tables = fake.tables();
        match unloaded {
            Ok(()) => tables.functions.retain(|_, (of, _)| *of != module),
            Err(_) => _ = tables.modules.insert(module, device),
        }
        unloaded
    }

    #[unsafe(no_mangle)]
    2000 init cuModuleGetFunction(function: Out<'_, u64>, module: u64, name: *const c_char) |fake| {
        let function = function.filter(|_| !name.is_null()).ok_or(CuResult::ERROR_INVALID_VALUE)?;
        // SAFETY: the caller passes a name that a zero byte ends (cuModuleGetFunction).
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| CuResult::ERROR_NOT_FOUND)?;
        let found = fake.sim.module_function(ModuleHandle(module), name)?;
        fake.tables().functions.insert(found.0, (module, name.to_owned()));
        function.write(found.0);
        Ok(())
    }

    #[unsafe(no_mangle)]
    4000 init cuLaunchKernel(
        function: u64,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: u64,
        arguments: *const *const c_void,
        extra: *const *const c_void,
    ) |fake| {
        let stream = StreamHandle(stream);
        let device = fake.device_of_stream(stream)?;
        let kernel = fake.tables().functions.get(&function).map(|(_, name)| name.clone()).ok_or(CuResult::ERROR_INVALID_HANDLE)?;
        if arguments.is_null() || !extra.is_null() {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        let mut decoded = Vec::new();
        for (index, parameter) in parameters(&kernel).iter().enumerate() {
            // SAFETY: the caller passes a pointer for each parameter of the kernel, to a value of its type
            // (cuLaunchKernel), and a value may lie at any address.
            decoded.push(unsafe {
                let at = arguments.add(index).read();
                match parameter {
                    Parameter::Pointer => KernelArgument::Pointer(DevicePtr::new(at.cast::<u64>().read_unaligned())),
                    Parameter::U64 => KernelArgument::U64(at.cast::<u64>().read_unaligned()),
                    Parameter::U32 => KernelArgument::U32(at.cast::<u32>().read_unaligned()),
                }
            });
        }
        let config = LaunchConfig { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], shared_bytes };
        fake.sim.launch_kernel(device, FunctionHandle(function), config, stream, &decoded)?;
        match decoded[..] {
            [KernelArgument::Pointer(to), _, KernelArgument::U32(seed)] if kernel == "fill" => spoil(fake, device, to, seed, stream),
            _ => Ok(()),
        }
    }
}

//! The [built-in kernels](BUILTIN_MODULE) as the simulated device runs them: what a module may hold, and what a launch may
//! ask for.

use super::backing::Backing;
use super::memory::Touch;
use super::space::Table;
use super::streams::Work;
use super::{SimDriver, State};
use crate::driver::kernels::BUILTIN_MODULE;
use crate::driver::{DriverResult, FunctionHandle, KernelArgument, LaunchConfig, ModuleHandle, StreamHandle};
use crate::error::CuResult;
use crate::units::{DeviceId, DevicePtr};

#[derive(Clone, Copy, Debug)]
enum Kernel {
    Fill,
    Check,
    Copy,
    Spin,
}

impl Kernel {
    const ALL: [Self; 4] = [Self::Fill, Self::Check, Self::Copy, Self::Spin];

    const fn name(self) -> &'static str {
        match self {
            Self::Fill => "fill",
            Self::Check => "check",
            Self::Copy => "copy",
            Self::Spin => "spin",
        }
    }
}

/// A launch whose arguments fit its kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum KernelCall {
    Fill { address: DevicePtr, words: u64, seed: u32 },
    Check { address: DevicePtr, words: u64, seed: u32, mismatches: DevicePtr },
    Copy { destination: DevicePtr, source: DevicePtr, bytes: u64 },
    Spin,
}

impl KernelCall {
    fn new(kernel: Kernel, arguments: &[KernelArgument]) -> Option<Self> {
        use KernelArgument::{Pointer, U32, U64};
        match (kernel, arguments) {
            (Kernel::Fill, &[Pointer(address), U64(words), U32(seed)]) => Some(Self::Fill { address, words, seed }),
            (Kernel::Check, &[Pointer(address), U64(words), U32(seed), Pointer(mismatches)]) => {
                Some(Self::Check { address, words, seed, mismatches })
            }
            (Kernel::Copy, &[Pointer(destination), Pointer(source), U64(bytes)]) => Some(Self::Copy { destination, source, bytes }),
            (Kernel::Spin, &[U64(_)]) => Some(Self::Spin),
            _ => None,
        }
    }

    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Fill { .. } => "kernel fill",
            Self::Check { .. } => "kernel check",
            Self::Copy { .. } => "kernel copy",
            Self::Spin => "kernel spin",
        }
    }

    pub(super) fn touches(&self) -> [Option<Touch>; 2] {
        match *self {
            Self::Fill { address, words, .. } => [Some(Touch::write(address, words.saturating_mul(4))), None],
            Self::Check { address, words, mismatches, .. } => {
                [Some(Touch::read(address, words.saturating_mul(4))), Some(Touch::write(mismatches, 8))]
            }
            Self::Copy { destination, source, bytes } => [Some(Touch::read(source, bytes)), Some(Touch::write(destination, bytes))],
            Self::Spin => [None, None],
        }
    }

    /// Does on backed memory what the kernel does. The ranges are touchable.
    pub(super) fn run(self, backing: &mut Backing) {
        match self {
            Self::Fill { address, words, seed } => backing.fill_pattern(address.address(), words, seed),
            Self::Check { address, words, seed, mismatches } => {
                let mut count = [0; 8];
                backing.read(&mut count, mismatches.address());
                let wrong = backing.check_pattern(address.address(), words, seed);
                backing.write(mismatches.address(), &u64::from_ne_bytes(count).wrapping_add(wrong).to_ne_bytes());
            }
            Self::Copy { destination, source, bytes } => backing.copy(destination.address(), source.address(), bytes),
            Self::Spin => {}
        }
    }
}

#[derive(Debug)]
pub(super) struct Modules {
    /// Loaded modules, each with the device of its context.
    pub(super) modules: Table<usize>,
}

/// Functions of a module follow its handle.
const FUNCTION_BIT: u64 = 1 << 52;

impl Modules {
    pub(super) fn new(reuse_handles: bool) -> Self {
        Self { modules: Table::new(0x5800_0000_0100, reuse_handles) }
    }

    fn kernel(&self, function: FunctionHandle) -> Option<(usize, Kernel)> {
        let value = function.0.checked_sub(FUNCTION_BIT)?;
        let index = value & 0xf;
        let &device = self.modules.get(value - index)?;
        Some((device, *Kernel::ALL.get(usize::try_from(index).ok()?)?))
    }
}

impl State {
    pub(super) fn module_load(&mut self, device: DeviceId, image: &[u8]) -> DriverResult<ModuleHandle> {
        let device = self.device(device)?;
        // The driver reads text up to its terminating zero.
        match image.split(|&byte| byte == 0).next().unwrap_or_default() {
            text if text == BUILTIN_MODULE.as_bytes() => {}
            text if text.trim_ascii_start().starts_with(b".version") => return Err(CuResult::ERROR_INVALID_PTX),
            _ => return Err(CuResult::ERROR_INVALID_IMAGE),
        }
        Ok(ModuleHandle(self.modules.modules.insert(device)))
    }

    pub(super) fn module_unload(&mut self, device: DeviceId, module: ModuleHandle) -> DriverResult<()> {
        let device = self.device(device)?;
        if self.modules.modules.get(module.0) != Some(&device) {
            return Err(CuResult::ERROR_INVALID_HANDLE);
        }
        self.modules.modules.remove(module.0);
        Ok(())
    }

    pub(super) fn module_function(&self, module: ModuleHandle, name: &str) -> DriverResult<FunctionHandle> {
        let &device = self.modules.modules.get(module.0).ok_or(CuResult::ERROR_INVALID_HANDLE)?;
        self.sound(device)?;
        let index = Kernel::ALL.iter().position(|kernel| kernel.name() == name).ok_or(CuResult::ERROR_NOT_FOUND)?;
        Ok(FunctionHandle(FUNCTION_BIT + module.0 + index as u64))
    }
}

impl SimDriver {
    pub(super) fn launch(
        &self,
        device: DeviceId,
        function: FunctionHandle,
        config: LaunchConfig,
        stream: StreamHandle,
        arguments: &[KernelArgument],
    ) -> DriverResult<()> {
        let call = {
            let state = self.state.lock();
            let index = state.device(device)?;
            let (owner, kernel) = state.modules.kernel(function).ok_or(CuResult::ERROR_INVALID_HANDLE)?;
            if owner != index {
                return Err(CuResult::ERROR_INVALID_HANDLE);
            }
            let threads = config.block.iter().map(|&n| u64::from(n)).product::<u64>();
            let blocks = config.grid.iter().map(|&n| u64::from(n)).fold(1, u64::saturating_mul);
            if threads == 0 || threads > 1024 || blocks == 0 || config.shared_bytes > 48 << 10 {
                return Err(CuResult::ERROR_INVALID_VALUE);
            }
            KernelCall::new(kernel, arguments).ok_or(CuResult::ERROR_INVALID_VALUE)?
        };
        self.work(device, stream, Work::Kernel(call))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_module_holds_every_kernel() {
        for kernel in Kernel::ALL {
            assert!(BUILTIN_MODULE.contains(&format!(".visible .entry {}(", kernel.name())));
        }
    }
}

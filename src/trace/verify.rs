//! Fills every block on the device right after it is allocated, and checks that all of it is still there before it is
//! freed.
//!
//! Each word of a block is made from the block's own seed and the word's place, so that a block that shares a byte with
//! another, or lost its memory in between, is found out. Words are of 4 bytes; the up to 3 bytes behind the last whole word
//! are set and compared as bytes. Nothing past the size that was asked for is touched.
//!
//! All of it is queued on the legacy stream, and waited for: a block is idle when it goes back to the pool. The calls are
//! made past the [`Meter`](crate::driver::Meter), and their time is kept, so that it can be taken off the pool's.

use crate::driver::kernels::{BUILTIN_MODULE, pattern};
use crate::driver::{Device, Driver, FunctionHandle, KernelArgument, LaunchConfig, MemoryKind, ModuleHandle, StreamHandle};
use crate::error::{CuResult, Error, Result};
use crate::sync::Arc;
use crate::units::{DeviceId, DevicePtr};
use std::time::{Duration, Instant};

const STREAM: StreamHandle = StreamHandle::LEGACY;
const WORD_BYTES: u64 = 4;
/// Threads of a launch: enough for any GPU, where each takes many words.
const BLOCK_THREADS: u32 = 256;
const MAX_GRID_BLOCKS: u64 = 4096;
/// The verifier's own memory: the counter of words that differ, and words to prove the kernels on.
const SCRATCH_BYTES: u64 = 64;
const PROOF_OFFSET: u64 = 32;
const PROOF_WORDS: u64 = 8;

/// What came of the verification of a replay.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Verification {
    /// The blocks that were filled and checked, over all passes.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How many of the blocks were not as they were filled.
    pub mismatches: u64,
    /// The first of them.
    pub first: Option<Mismatch>,
}

/// A block that was not as it was filled.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Mismatch {
    /// The index in [`Trace::events`](super::Trace::events) of the event that frees the block, before which it was checked;
    /// `None` where it was left live, and checked at the end of the pass.
    pub index: Option<usize>,
    /// The index of the event that allocated it.
    pub allocated: usize,
    /// The pass, counted from one.
    pub pass: u32,
    /// Where the block lies.
    pub address: DevicePtr,
    /// The block's bytes, as asked for.
    pub size: u64,
    /// How many of its 32-bit words differ. The bytes behind the last whole word count as one.
    pub words: u64,
}

/// A live block as it was filled.
#[derive(Clone, Copy)]
struct Filled {
    address: DevicePtr,
    size: u64,
    seed: u32,
    allocated: usize,
}

impl Filled {
    fn new(address: DevicePtr, size: u64, allocated: usize, pass: u32) -> Self {
        // No two blocks of a pass have one seed, nor has a block that of its like in the pass before.
        let seed = (allocated as u32).wrapping_mul(0x85eb_ca6b).wrapping_add(pass.wrapping_mul(0xc2b2_ae35));
        Self { address, size, seed, allocated }
    }

    fn words(&self) -> u64 {
        self.size / WORD_BYTES
    }

    /// The bytes behind the last whole word: where, how many, and what each is set to.
    fn tail(&self) -> (DevicePtr, usize, u8) {
        let words = self.words();
        (self.address.offset(words * WORD_BYTES), (self.size % WORD_BYTES) as usize, pattern(self.seed, words) as u8)
    }
}

pub(super) struct Verifier {
    site: Site,
    fill_kernel: FunctionHandle,
    check_kernel: FunctionHandle,
    /// What the counter stands at: it is never set back.
    counted: u64,
    /// The blocks that are filled, by number.
    filled: Vec<Option<Filled>>,
    /// The time that verification took so far.
    pub(super) wall: Duration,
    /// The same by the device's model, where it has one.
    pub(super) modelled_ns: u64,
    pub(super) result: Verification,
}

/// What is held from the driver.
struct Site {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    module: ModuleHandle,
    scratch: DevicePtr,
}

impl Drop for Site {
    fn drop(&mut self) {
        // There is nobody to tell of a failure, which earlier work has been told of already.
        _ = self.driver.mem_free(self.device, MemoryKind::Device, self.scratch);
        _ = self.driver.module_unload(self.device, self.module);
    }
}

impl Site {
    fn launch(&self, function: FunctionHandle, words: u64, arguments: &[KernelArgument]) -> Result<()> {
        if words == 0 {
            return Ok(());
        }
        let blocks = words.div_ceil(u64::from(BLOCK_THREADS)).min(MAX_GRID_BLOCKS) as u32;
        let config = LaunchConfig { grid: [blocks, 1, 1], block: [BLOCK_THREADS, 1, 1], shared_bytes: 0 };
        self.driver.launch_kernel(self.device, function, config, STREAM, arguments).map_err(|code| Error::driver("cuLaunchKernel", code))
    }

    fn set(&self, address: DevicePtr, value: u8, bytes: u64) -> Result<()> {
        self.driver.memset_d8_async(self.device, address, value, bytes, STREAM).map_err(|code| Error::driver("cuMemsetD8Async", code))
    }

    fn read(&self, to: &mut [u8], from: DevicePtr) -> Result<()> {
        self.driver.memcpy_device_to_host(self.device, to, from).map_err(|code| Error::driver("cuMemcpyDtoH", code))
    }

    fn wait(&self) -> Result<()> {
        self.driver.stream_synchronize(self.device, STREAM).map_err(|code| Error::driver("cuStreamSynchronize", code))
    }
}

impl Verifier {
    /// Loads the kernels and proves them.
    pub(super) fn new(device: &Device, blocks: usize) -> Result<Self> {
        let (driver, id) = (Arc::clone(device.driver()), device.id());
        let image = format!("{BUILTIN_MODULE}\0");
        let module = driver.module_load(id, image.as_bytes()).map_err(|code| Error::driver("cuModuleLoadData", code))?;
        let mut site = Site { driver, device: id, module, scratch: DevicePtr::NULL };
        let function = |name| site.driver.module_function(module, name).map_err(|code| Error::driver("cuModuleGetFunction", code));
        let (fill_kernel, check_kernel) = (function("fill")?, function("check")?);
        site.scratch = site.driver.mem_alloc(id, MemoryKind::Device, SCRATCH_BYTES).map_err(|code| Error::driver("cuMemAlloc", code))?;
        site.set(site.scratch, 0, SCRATCH_BYTES)?;
        let mut verifier = Self {
            site,
            fill_kernel,
            check_kernel,
            counted: 0,
            filled: vec![None; blocks],
            wall: Duration::ZERO,
            modelled_ns: 0,
            result: Verification::default(),
        };
        match verifier.prove() {
            Ok(true) => Ok(verifier),
            // What has no bytes to read cannot be verified.
            Err(error) if error.code() != Some(CuResult::ERROR_NOT_SUPPORTED) => Err(error),
            _ => Err(Error::unavailable("nothing can be verified on this device: there is no memory behind its addresses")),
        }
    }

    /// Whether what is wrong is found: words that are as filled do not count, and with another seed all of them do.
    fn prove(&mut self) -> Result<bool> {
        let right = Filled { address: self.site.scratch.offset(PROOF_OFFSET), size: PROOF_WORDS * WORD_BYTES, seed: 1, allocated: 0 };
        self.write(&right)?;
        let found = [self.differing(&right)?, self.differing(&Filled { seed: 2, ..right })?];
        Ok(found == [0, PROOF_WORDS])
    }

    /// Fills a block, and remembers it by its number.
    pub(super) fn fill(&mut self, block: usize, address: DevicePtr, size: u64, allocated: usize, pass: u32) -> Result<()> {
        self.filled[block] = None;
        let filled = Filled::new(address, size, allocated, pass);
        self.timed(|this| this.write(&filled))?;
        self.filled[block] = Some(filled);
        Ok(())
    }

    /// Checks the block of that number before event `index`, or at the end of the pass. A block that could not be had or
    /// filled is passed over.
    pub(super) fn check(&mut self, block: usize, index: Option<usize>, pass: u32) -> Result<()> {
        match self.filled[block].take() {
            Some(filled) => self.compare(&filled, index, pass),
            None => Ok(()),
        }
    }

    /// Fills and checks a block that is freed by the event that allocated it.
    pub(super) fn fill_and_check(&mut self, address: DevicePtr, size: u64, index: usize, pass: u32) -> Result<()> {
        let filled = Filled::new(address, size, index, pass);
        self.timed(|this| this.write(&filled))?;
        self.compare(&filled, Some(index), pass)
    }

    fn compare(&mut self, filled: &Filled, index: Option<usize>, pass: u32) -> Result<()> {
        let words = self.timed(|this| this.differing(filled))?;
        self.result.blocks += 1;
        self.result.bytes += filled.size;
        if words > 0 {
            self.result.mismatches += 1;
            let &Filled { address, size, allocated, .. } = filled;
            self.result.first.get_or_insert(Mismatch { index, allocated, pass, address, size, words });
        }
        Ok(())
    }

    fn write(&mut self, filled: &Filled) -> Result<()> {
        use KernelArgument::{Pointer, U32, U64};
        if filled.size == 0 {
            return Ok(());
        }
        let words = filled.words();
        self.site.launch(self.fill_kernel, words, &[Pointer(filled.address), U64(words), U32(filled.seed)])?;
        let (tail, bytes, value) = filled.tail();
        if bytes > 0 {
            self.site.set(tail, value, bytes as u64)?;
        }
        // What the pool does next is timed, and does not wait for this.
        self.site.wait()
    }

    /// How many words differ, the tail's bytes being one.
    fn differing(&mut self, filled: &Filled) -> Result<u64> {
        use KernelArgument::{Pointer, U32, U64};
        let mut differing = 0;
        let words = filled.words();
        if words > 0 {
            let counter = self.site.scratch;
            self.site.launch(self.check_kernel, words, &[Pointer(filled.address), U64(words), U32(filled.seed), Pointer(counter)])?;
            let mut count = [0; 8];
            self.site.read(&mut count, counter)?;
            let count = u64::from_le_bytes(count);
            differing = count.wrapping_sub(self.counted);
            self.counted = count;
        }
        let (tail, bytes, value) = filled.tail();
        if bytes > 0 {
            // Not what is expected, should nothing be read.
            let mut read = [!value; WORD_BYTES as usize];
            self.site.read(&mut read[..bytes], tail)?;
            differing += u64::from(read[..bytes].iter().any(|&byte| byte != value));
        }
        Ok(differing)
    }

    fn timed<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let modelled = self.site.driver.modelled_ns();
        let start = Instant::now();
        let result = work(self);
        self.wall += start.elapsed();
        let since = self.site.driver.modelled_ns().zip(modelled).map_or(0, |(now, then)| now.saturating_sub(then));
        self.modelled_ns += since;
        result
    }
}

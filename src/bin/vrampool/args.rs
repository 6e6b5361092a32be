//! What the program is told on the command line.

use clap::{Args, Parser, Subcommand};
use std::num::NonZeroU32;
use std::path::PathBuf;
use vrampool::driver::{DeviceChoice, MemoryKind};
use vrampool::units::parse_bytes;

/// The most threads that a benchmark starts.
const MAX_THREADS: usize = 1024;

/// A GPU memory pool over the CUDA driver: replay real allocation traces on it, and see what it took.
#[derive(Debug, Parser)]
#[command(
    version,
    arg_required_else_help = true,
    after_help = "Exit status: 0 done; 1 the work failed (out of memory, or --verify found a mismatch: the event is named); 2 unusable arguments or file."
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Feed recorded allocations and frees to a pool, and print the memory and the driver calls that it took
    Replay(ReplayArguments),
    /// Find the smallest capacity at which recorded allocations and frees can all be served
    MinCapacity(MinCapacityArguments),
    /// Time allocations and frees: of the driver, of a pool, and of an allocator of host memory
    Bench(BenchArguments),
    /// Print the driver and its devices
    Info(InfoArguments),
}

#[derive(Debug, Args)]
pub(crate) struct ReplayArguments {
    /// RMM's allocation log, plain or gzip-compressed; `-` is standard input
    #[arg(required = true, value_name = "TRACE")]
    pub(crate) traces: Vec<PathBuf>,

    /// The most memory that the pool may hold, such as 8GiB, 512MiB or 4096
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) capacity: Option<u64>,

    /// Make exactly this many passes over each trace, the first of them cold; by default one, and then warm ones until
    /// the time is steady
    #[arg(long, value_name = "N")]
    pub(crate) repeat: Option<NonZeroU32>,

    /// Have the device fill each block when it is allocated, and check every word of it before it is freed. The simulated
    /// device then has the host's memory behind it, and is no larger than the traces need
    #[arg(long)]
    pub(crate) verify: bool,

    #[command(flatten)]
    pub(crate) common: CommonArguments,
}

/// The capacity is found to one page of the pool. There, and at eight larger ones up to 1.05 times it, one pass over the trace
/// on a fresh pool completes.
///
/// The environment variable VRAMPOOL_CONFIG describes the pool, but for its `maximum`, which is each trial's own.
#[derive(Debug, Args)]
pub(crate) struct MinCapacityArguments {
    /// RMM's allocation log, plain or gzip-compressed; `-` is standard input
    #[arg(required = true, value_name = "TRACE")]
    pub(crate) traces: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) common: CommonArguments,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    /// Numbers of threads that allocate and free at once, such as 1,2,4; by default 1, 2, 4, 8 and 16, up to the number of
    /// cores
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = parse_threads)]
    pub(crate) threads: Vec<usize>,

    /// Sizes to allocate and free by themselves, such as 256,64KiB,2MiB; by default 256 B to 256 MiB in steps of four
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = parse_size)]
    pub(crate) sizes: Vec<u64>,

    /// What memory; by default what the environment variable VRAMPOOL_CONFIG says, or else the device's
    #[arg(long, value_name = "device|pinned|managed")]
    pub(crate) kind: Option<MemoryKind>,

    #[command(flatten)]
    pub(crate) common: CommonArguments,
}

fn parse_threads(text: &str) -> Result<usize, String> {
    match text.trim().parse() {
        Ok(threads @ 1..=MAX_THREADS) => Ok(threads),
        _ => Err(format!("'{text}' is not a number of threads from 1 to {MAX_THREADS}")),
    }
}

fn parse_size(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        0 => Err("an allocation of 0 bytes takes no memory".to_owned()),
        size => Ok(size),
    }
}

#[derive(Debug, Args)]
pub(crate) struct InfoArguments {
    #[command(flatten)]
    pub(crate) common: CommonArguments,
}

#[derive(Debug, Args)]
pub(crate) struct CommonArguments {
    /// The device: `auto` (the first CUDA device, or the simulated one where there is none), `sim`, or `cuda:N`. Without
    /// it the environment variable VRAMPOOL_DEVICE decides
    #[arg(long, value_name = "auto|sim|cuda:N")]
    pub(crate) device: Option<DeviceChoice>,

    /// Print one JSON object on standard output, and nothing else there
    #[arg(long)]
    pub(crate) json: bool,
}

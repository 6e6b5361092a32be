//! What the program is told on the command line.

use crate::device::Choice;
use clap::{Args, Parser, Subcommand};
use std::num::NonZeroU32;
use std::path::PathBuf;

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
    /// Print the driver and its devices
    Info(InfoArguments),
}

#[derive(Debug, Args)]
pub(crate) struct ReplayArguments {
    /// RMM's allocation log, plain or gzip-compressed; `-` is standard input
    #[arg(required = true, value_name = "TRACE")]
    pub(crate) traces: Vec<PathBuf>,

    /// The most memory that the pool may hold, such as 8GiB, 512MiB or 4096
    #[arg(long, value_name = "SIZE", value_parser = vrampool::units::parse_bytes)]
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
    pub(crate) device: Option<Choice>,

    /// Print one JSON object on standard output, and nothing else there
    #[arg(long)]
    pub(crate) json: bool,
}

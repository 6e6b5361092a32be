//! GPU memory pooling: memory is taken from the CUDA driver once and served from a pool.
//!
//! ```
//! # #[cfg(feature = "sim")] {
//! use vrampool::{Device, Pool};
//!
//! // `Device::first()?` is the first CUDA device.
//! let pool = Pool::builder().device(Device::simulated()).maximum(8 << 30).build()?;
//!
//! // Owned: freed when it is dropped.
//! let weights = pool.allocate_buffer(64 << 20)?;
//! // By address, as C programs and frameworks hold memory.
//! let scratch = pool.allocate(300)?;
//! // SAFETY: nothing was queued that touches the block.
//! unsafe { pool.deallocate(scratch)? };
//!
//! let statistics = pool.statistics();
//! assert_eq!(statistics.requested_bytes, weights.size());
//! assert_eq!(statistics.accounted_bytes(), statistics.reserved_bytes);
//! # }
//! # Ok::<(), vrampool::Error>(())
//! ```
//!
//! - Requests up to 64 KiB are served from [slabs](Statistics::classes) of 28 size classes, larger ones from a
//!   [tree of free runs](buddy::tree) in units of 16 KiB. Nothing is rounded to a power of two.
//! - Physical memory is mapped page by page under a large range of reserved addresses. Where the device cannot do that,
//!   and for pinned and managed memory, the pool is made of plain allocations.
//! - Every address is a multiple of 256; [`Pool::allocate_aligned`] goes up to 1 GiB.
//! - [`Pool::reserve`] sets memory aside for blocks that must not fail, and [`Pool::try_grow`] makes a block longer where it is.
//! - A failed operation changes nothing, and its [`Error`] has the numbers. Freeing what is not a live block is an error.
//! - All layers stand on one trait, [`driver::Driver`], and run unchanged on [CUDA](driver::cuda) and on the
//!   [simulated device](driver::sim).
//!
//! # Stream ordering
//! In this version the pool knows nothing of streams: a block may be freed when no queued work touches it, and memory
//! from [`Pool::allocate`] may be used on any stream.
//!
//! # Features
//! | feature | default | |
//! |---|---|---|
//! | `sim` | yes | the simulated device |
//! | `trace` | no | reading and replaying allocation traces |
//! | `cli` | no | the program `vrampool` |
//! | `cuda-sys` | no | conversions to and from the handles of the crate `cuda-sys` |
//! | `testing` | no | the shadow allocator and the runner of the crate's own tests; not a stable interface |
#![cfg_attr(docsrs, feature(doc_cfg))]
// The documentation speaks of the simulated device whether it is there or not.
#![cfg_attr(not(feature = "sim"), allow(rustdoc::broken_intra_doc_links))]

mod arena;
pub mod buddy;
pub mod driver;
pub mod error;
pub mod pool;
mod slab;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "trace")]
pub mod trace;
pub mod units;

pub use driver::Device;
pub use error::{Error, Result};
pub use pool::{DeviceBuffer, Pool, PoolBuilder, Reservation, Statistics};
pub use units::DevicePtr;

/// The README's program, compiled and run with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

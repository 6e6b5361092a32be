//! GPU memory pooling over the CUDA driver.
#![cfg_attr(docsrs, feature(doc_cfg))]

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
pub use pool::{DeviceBuffer, Pool, PoolBuilder, Statistics};
pub use units::DevicePtr;

/// The README's program, compiled and run with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

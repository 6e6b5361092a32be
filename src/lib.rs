//! GPU memory pooling over the CUDA driver.
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod buddy;
pub mod driver;
pub mod error;
mod sync;
pub mod units;

pub use error::{Error, Result};

/// The README's program, compiled and run with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

//! GPU memory pooling over the CUDA driver.
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod buddy;
pub mod driver;
pub mod error;
mod sync;
pub mod units;

pub use error::{Error, Result};

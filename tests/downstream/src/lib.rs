//! What a library with a driver of its own does with the pool.
#![deny(warnings)]

use std::sync::Arc;
use vrampool::driver::{Driver, Meter};
use vrampool::units::DeviceId;
use vrampool::{Device, Pool, Result};

/// Allocates and frees on the first device of any driver, and says how many bytes the pool took for it.
///
/// # Errors
/// The pool's.
pub fn round_trip<D: Driver + 'static>(driver: Arc<D>) -> Result<u64> {
    let meter = Arc::new(Meter::new(driver));
    let pool = Pool::builder().device(Device::new(meter.clone(), DeviceId(0))?).maximum(1 << 30).build()?;
    let address = pool.allocate(1 << 20)?;
    // SAFETY: no work was queued that touches the block.
    unsafe { pool.deallocate(address)? };
    Ok(meter.peak_reserved_bytes())
}

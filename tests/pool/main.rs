//! What has gone wrong in other memory pools, as tests of this one through its public interface, on the simulated device.
//!
//! Each test is named for what must hold and says what goes wrong where it does not.

mod amid;
mod contiguous;
mod fragmentation;
mod geometry;
mod growth;
mod lifetime;
mod limits;
mod ownership;
mod purposes;
mod reservations;
mod sizes;
mod support;
mod threads;
mod unwinding;

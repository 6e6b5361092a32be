//! A `libcuda.so.1` without a GPU: the CUDA driver's C functions over vrampool's simulated device, for tests of the
//! binding.
//!
//! The simulated device obeys the rules of vrampool's driver trait; this library adds those that the trait hides:
//!
//! - Before `cuInit` every call but `cuDriverGetVersion`, `cuGetErrorName`, `cuGetErrorString` and `cuGetProcAddress`
//!   returns 3, `CUDA_ERROR_NOT_INITIALIZED`; in a child of a fork too.
//! - Each thread has a stack of contexts. A call that works in the current context returns 201,
//!   `CUDA_ERROR_INVALID_CONTEXT`, where there is none; a call that names a stream, an event or memory needs none, and
//!   works in the context of what it names. Handles 0, 1 and 2 are the current context's default streams. Virtual memory
//!   management needs no context.
//! - Primary contexts are counted. The last release takes everything in the context with it, and returns 201 from then
//!   on; a thread that still has the context current gets 709, `CUDA_ERROR_CONTEXT_IS_DESTROYED`.
//!
//! These, code by code, are what an H200 with driver 580 (CUDA 13.0) answered. Where the simulated device says that
//! behaviour is undefined it panics, which here ends the process: so may the driver.
//!
//! # Controls
//! [`control`] has the functions named `fake_…`, [`profile`] what a machine may be made of.
#![allow(non_snake_case)] // The names are C's.

mod context;
pub mod control;
mod entry;
mod lookup;
mod memory;
pub mod profile;
mod state;
mod streams;
mod vmm;
mod work;

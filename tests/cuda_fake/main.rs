//! The binding to the CUDA driver, over a driver's library made of the simulated device (`tests/fake-libcuda`).
//!
//! The binding is one for the process, so a scenario that needs a machine of its own runs in a child: see
//! [`support::in_children`].
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // C functions are called, and processes forked.

mod conforms;
mod contexts;
mod ends;
mod library;
mod missing;
mod outcomes;
mod program;
mod raw;
mod support;

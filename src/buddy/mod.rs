//! **Buddy layer**: large requests, as runs of grains.

pub mod classic;

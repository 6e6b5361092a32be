//! The crate's own kernels: PTX that any device loads.

/// The kernels as PTX text, which every device since compute capability 6.0 takes; the one image that a simulated device
/// loads.
///
/// The kernels, with their arguments:
///
/// | name | arguments | does |
/// |---|---|---|
/// | `fill` | pointer, u64 words, u32 seed | writes a [pattern] of 32-bit words that depends on seed and position |
/// | `check` | pointer, u64 words, u32 seed, pointer to a u64 | adds to the u64 how many words differ from that pattern |
/// | `copy` | pointer to, pointer from, u64 bytes | copies bytes between ranges that do not overlap |
/// | `spin` | u64 nanoseconds | takes that long on a GPU, and nothing on a simulated device |
///
/// The text is made from `kernels.cu` beside this file. A module is loaded from it with a zero byte at its end.
pub const BUILTIN_MODULE: &str = include_str!("kernels.ptx");

/// Word `index` of the pattern that `fill` writes and `check` expects. Two seeds differ in every word.
#[must_use]
pub const fn pattern(seed: u32, index: u64) -> u32 {
    let mixed = (index as u32 ^ (index >> 32) as u32).wrapping_mul(0x9e37_79b1) ^ seed;
    (mixed ^ (mixed >> 15)).wrapping_mul(0x85eb_ca77)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_is_what_the_kernel_writes_on_a_gpu() {
        let seen_on_an_h200 = [0xa972_8941, 0xb39e_e768, 0x2b8a_2288, 0x6583_00e8];
        for (index, word) in seen_on_an_h200.into_iter().enumerate() {
            assert_eq!(pattern(7, index as u64), word);
        }
    }
}

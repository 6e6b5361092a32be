//! The work of RMM's benchmark `random_allocations`, draw for draw: the same sizes in the same order as that program
//! takes from GNU's C++ library.

use super::work::{Event, Work};

/// `std::minstd_rand0`, which is GNU's `std::default_random_engine`: the multiplicative generator of Lewis, Goodman and
/// Miller, begun at 1.
#[derive(Clone, Debug)]
pub(crate) struct Minstd(u64);

impl Minstd {
    const MODULUS: u64 = (1 << 31) - 1;
    /// The smallest value.
    const LOWEST: u64 = 1;
    /// The largest value less the smallest.
    const SPREAD: u64 = Self::MODULUS - 1 - Self::LOWEST;

    /// The generator as it is without a seed.
    pub(crate) fn new() -> Self {
        Self(1)
    }

    /// The next value, from 1 to 2^31 − 2.
    pub(crate) fn draw(&mut self) -> u64 {
        self.0 = self.0 * 16_807 % Self::MODULUS;
        self.0
    }

    /// `std::uniform_int_distribution` over `low..=high`, as GNU's library computes it from a generator whose values are
    /// no whole number of bits.
    pub(crate) fn uniform(&mut self, low: u64, high: u64) -> u64 {
        low.wrapping_add(self.up_to(high - low))
    }

    fn up_to(&mut self, highest: u64) -> u64 {
        if highest == Self::SPREAD {
            return self.draw() - Self::LOWEST;
        }
        if highest < Self::SPREAD {
            // Equal shares of the generator's values; what does not fill a share is drawn again.
            let share = Self::SPREAD / (highest + 1);
            loop {
                let value = (self.draw() - Self::LOWEST) / share;
                if value <= highest {
                    return value;
                }
            }
        }
        // A number of two digits to the base of the generator's values; what is too large, or wraps, is drawn again.
        let base = Self::SPREAD + 1;
        loop {
            let digit = base.wrapping_mul(self.up_to(highest / base));
            let value = digit.wrapping_add(self.draw() - Self::LOWEST);
            if value <= highest && value >= digit {
                return value;
            }
        }
    }
}

/// The most bytes that the benchmark keeps live.
const CAP: u64 = 16_000 << 20;
/// Of a hundred steps, so many allocate.
const ALLOCATE: u64 = 73;

/// `count` allocations of 1 byte to `largest_mib` MiB among as many frees, at the end of which nothing is live.
///
/// Every step draws a size, used or not. With nothing live it allocates. Otherwise it draws whether to allocate, which it
/// does unless all allocations are made or the live bytes would reach 16,000 MiB; a step that does not allocate
/// frees one at random, and the last one takes its place in the list.
pub(crate) fn random_allocations(count: usize, largest_mib: u64) -> Work {
    let mut random = Minstd::new();
    let mut events = Vec::with_capacity(2 * count);
    let mut live: Vec<(usize, u64)> = Vec::new();
    let (mut live_bytes, mut allocated) = (0, 0);
    for _ in 0..2 * count {
        let size = random.uniform(1, largest_mib << 20);
        let allocate = live.is_empty() || (random.uniform(0, 99) < ALLOCATE && allocated < count && live_bytes + size < CAP);
        if allocate {
            live.push((allocated, size));
            allocated += 1;
            live_bytes += size;
            events.push(Event::Allocate(size));
        } else {
            let index = random.uniform(0, count as u64 - 1) as usize % live.len();
            let (number, size) = live.swap_remove(index);
            live_bytes -= size;
            events.push(Event::Free(number));
        }
    }
    Work { name: format!("random {count} x 1 B..{largest_mib} MiB"), events }
}

//! The benches' own parts: their works are what they say, and the baseline's arenas are in order.

#[path = "../benches/support/mod.rs"]
#[allow(dead_code, reason = "the benches use all of it")]
mod support;

use std::collections::BTreeMap;
use support::arenas::Arenas;
use support::contiguous::{Choice, Contiguous, GRAIN};
use support::random_allocations::{Minstd, random_allocations};
use support::work::Event;
use vrampool::buddy::classic::Tails;

/// The value that the C++ standard gives for this generator.
#[test]
fn the_generator_is_the_standards() {
    let mut random = Minstd::new();
    for _ in 1..10_000 {
        random.draw();
    }
    assert_eq!(random.draw(), 1_043_618_065);
}

/// Draws printed by a C++ program built with g++ 12.2, for ranges smaller than the generator's, equal to it, and larger.
#[test]
fn the_distribution_is_gnus() {
    let cases: &[(u64, u64, [u64; 8])] = &[
        (0, 99, [0, 13, 75, 45, 53, 21, 4, 67]),
        (0, 99_999, [0, 13_154, 75_563, 45_866, 53_278, 21_896, 4704, 67_889]),
        (1, 1 << 20, [9, 137_995, 792_697, 481_165, 558_920, 229_708, 49_354, 712_189]),
        (1, 64 << 20, [543, 9_112_105, 52_343_551, 31_772_377, 36_906_740, 15_168_106, 3_258_954, 47_027_448]),
        (1, 1 << 30, [16_807, 282_475_249, 984_943_658, 470_211_272, 101_027_544, 823_564_440, 74_243_042, 114_807_987]),
        (1, 2 << 30, [282_475_249, 1_457_850_878, 1_115_438_165, 1_137_522_503, 143_542_612, 1_474_833_169, 1_404_280_278, 1_505_795_335]),
        (
            1,
            4 << 30,
            [282_475_249, 2_617_694_918, 1_457_850_878, 3_262_921_811, 1_137_522_503, 2_291_026_258, 3_622_316_815, 4_145_580_803],
        ),
        (0, 2_147_483_645, [16_806, 282_475_248, 1_622_650_072, 984_943_657, 1_144_108_929, 470_211_271, 101_027_543, 1_457_850_877]),
        (
            0,
            2_147_483_646,
            [282_475_248, 1_457_850_877, 1_115_438_164, 1_137_522_502, 143_542_611, 1_474_833_168, 1_404_280_277, 1_505_795_334],
        ),
        (
            0,
            u64::MAX,
            [
                606_610_977_102_444_280,
                11_680_327_234_415_193_037,
                3_130_710_918_123_035_464,
                13_055_523_280_712_283_859,
                2_442_810_971_443_284_618,
                1_768_192_591_358_509_605,
                12_390_552_129_798_094_868,
                9_647_485_219_232_062_217,
            ],
        ),
    ];
    for (low, high, expected) in cases {
        let mut random = Minstd::new();
        assert_eq!(std::array::from_fn(|_| random.uniform(*low, *high)), *expected, "{low}..={high}");
    }
}

/// FNV-1a over the events: an allocation's size, or the complement of the number of what is freed.
fn digest(events: &[Event]) -> u64 {
    let words = events.iter().map(|event| match *event {
        Event::Allocate(size) => size,
        Event::Free(number) => !(number as u64),
    });
    words.flat_map(u64::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// The benchmark's own loop, written in C++ after RMM's and built with g++ 12.2, gave these.
#[test]
fn the_works_are_the_benchmarks() {
    for (count, largest_mib, peak_bytes, expected) in [
        (1000, 1, 323_760_572, 0x575b_6b98_b271_7df1),
        (1000, 64, 16_777_102_043, 0x4f4b_4f49_18f9_2256),
        (1000, 1024, 16_775_773_201, 0xd1a3_486e_36ec_9136),
        (1000, 4096, 16_775_344_215, 0x098c_cf58_8164_283b),
        (10_000, 1, 3_254_545_443, 0xd416_d36e_1a48_c5ad),
        (10_000, 64, 16_777_214_948, 0xe36c_def8_5823_1ac0),
        (10_000, 1024, 16_777_185_961, 0x09b6_8fd8_e404_b448),
        (10_000, 4096, 16_775_887_653, 0xb715_d00e_4d0e_f2d9),
        (100_000, 1, 16_777_215_997, 0x262b_b828_60dc_f6a7),
        (100_000, 64, 16_777_214_347, 0xa0fb_e2a2_26d1_ff97),
        (100_000, 1024, 16_777_213_763, 0x1b78_adf4_1b12_55dc),
        (100_000, 4096, 16_777_201_659, 0x58e6_0045_fea3_4127),
    ] {
        let work = random_allocations(count, largest_mib);
        let allocations = work.events.iter().filter(|event| matches!(event, Event::Allocate(_))).count();
        assert_eq!(allocations, count);
        assert_eq!(work.events.len(), 2 * count, "nothing stays live");
        assert_eq!(work.peak_live_bytes(), peak_bytes, "{}", work.name);
        assert_eq!(digest(&work.events), expected, "{}", work.name);
    }
}

#[test]
fn arenas_hold_a_random_work() {
    for tails in [Tails::Kept, Tails::GivenBack] {
        for (count, largest_mib) in [(1000, 1), (1000, 256)] {
            let work = random_allocations(count, largest_mib);
            let mut arenas = Arenas::new(tails);
            let mut blocks = Vec::new();
            let mut taken: BTreeMap<(usize, u64), u64> = BTreeMap::new();
            let mut sizes = Vec::new();
            for (step, event) in work.events.iter().enumerate() {
                match *event {
                    Event::Allocate(size) => {
                        let block = arenas.allocate(size);
                        let (arena, start) = Arenas::place(block);
                        let before = taken.range(..(arena, start + size)).next_back();
                        assert!(before.is_none_or(|((other, at), length)| *other != arena || at + length <= start));
                        taken.insert((arena, start), size);
                        blocks.push(block);
                        sizes.push(size);
                    }
                    Event::Free(number) => {
                        arenas.free(blocks[number]);
                        assert_eq!(taken.remove(&Arenas::place(blocks[number])), Some(sizes[number]));
                    }
                }
                if step % 64 == 0 {
                    arenas.check().unwrap();
                }
            }
            arenas.check().unwrap();
            assert!(taken.is_empty());
            assert!(arenas.reserved_bytes() >= work.peak_live_bytes());
            assert_eq!(arenas.reserved_bytes() % (64 << 20), 0);
        }
    }
}

/// Beside a search of every free run in a plain list.
#[test]
fn first_and_best_fit_take_the_run_they_are_to_take() {
    for choice in [Choice::First, Choice::Best] {
        for (count, largest_mib, pages) in [(1000, 1, 180), (2000, 64, 8300)] {
            let work = random_allocations(count, largest_mib);
            let grains = pages * (2 << 20) / GRAIN;
            let mut memory = Contiguous::new(grains, choice);
            let mut places = Vec::new();
            let mut failed = 0;
            for event in &work.events {
                match *event {
                    Event::Allocate(size) => {
                        let wanted = size.div_ceil(GRAIN);
                        let fitting = memory.free_runs().filter(|&(_, length)| length >= wanted);
                        let expected = match choice {
                            Choice::First => fitting.min_by_key(|&(start, _)| start),
                            Choice::Best => fitting.min_by_key(|&(start, length)| (length, start)),
                        };
                        let place = memory.allocate(size);
                        assert_eq!(place, expected.map(|(start, _)| start));
                        failed += u32::from(place.is_none());
                        places.push(place);
                    }
                    Event::Free(number) => {
                        if let Some(place) = places[number] {
                            memory.free(place);
                        }
                    }
                }
            }
            assert_eq!(memory.free_runs().collect::<Vec<_>>(), [(0, grains)], "all is one free run again");
            assert!(failed < count as u32 / 2);
        }
    }
}

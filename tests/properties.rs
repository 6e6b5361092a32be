//! Random sequences of operations against the shadow allocator.

use proptest::prelude::*;
use vrampool::testing::{Op, Setup, Size, encode, run};

fn size() -> impl Strategy<Value = Size> {
    // Slots, grains, pages; and what lies round their edges.
    let exact =
        prop::sample::select(vec![8u8, 9, 13, 14, 15, 16, 17, 20, 21, 22, 24, 25]).prop_map(|exponent| Size { exponent, fraction: 0 });
    let anything = (0..27u8, any::<u16>()).prop_map(|(exponent, fraction)| Size { exponent, fraction });
    let large = (19..26u8, any::<u16>()).prop_map(|(exponent, fraction)| Size { exponent, fraction });
    prop_oneof![2 => exact, 3 => anything, 3 => large]
}

fn allocate() -> impl Strategy<Value = Op> {
    let alignment = prop_oneof![4 => Just(0u8), 1 => 1..24u8];
    (size(), alignment, any::<bool>()).prop_map(|(size, alignment, buffer)| Op::Allocate { size, alignment, buffer })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => allocate(),
        8 => any::<u16>().prop_map(|which| Op::Free { which }),
        1 => any::<u16>().prop_map(|which| Op::FreeUnderBuffer { which }),
        1 => (any::<u16>(), prop::sample::select(vec![0u16, 1, 255, 256, 257, 1024, 16384])).prop_map(|(which, offset)| Op::FreeInvalid { which, offset }),
        1 => (0..8u8).prop_map(|pages| Op::Trim { pages }),
        1 => (0..3u8).prop_map(|order| Op::FreeAll { order }),
    ]
}

fn disturbed() -> impl Strategy<Value = Op> {
    prop_oneof![
        20 => op(),
        2 => (0..8u8, 0..6u8, any::<bool>()).prop_map(|(call, after, fatal)| Op::Fail { call, after, fatal }),
        2 => (1..8u8, any::<u16>(), any::<bool>()).prop_map(|(after, which, trim)| Op::Amid { after, which, trim }),
    ]
}

fn setup() -> impl Strategy<Value = Setup> {
    (
        0..4u8,
        0..24u8,
        prop_oneof![Just(0u8), 1..20u8],
        prop_oneof![3 => Just(0u8), 1 => 0..6u8],
        prop_oneof![3 => Just(0u8), 1 => 0..6u8],
        0..3u8,
    )
        .prop_map(|(device, memory_pages, maximum_pages, initial_pages, growth_pages, placement)| Setup {
            device,
            memory_pages,
            maximum_pages,
            initial_pages,
            growth_pages,
            placement,
        })
}

fn check(setup: Setup, ops: &[Op]) -> Result<(), TestCaseError> {
    run(setup, ops).map_err(|error| {
        let bytes: String = encode(setup, ops).iter().map(|byte| format!("{byte:02x}")).collect();
        TestCaseError::fail(format!("{error}\nas corpus bytes: {bytes}"))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn a_pool_keeps_its_promises(setup in setup(), ops in prop::collection::vec(op(), 1..120)) {
        check(setup, &ops)?;
    }

    #[test]
    fn a_pool_keeps_its_promises_while_the_driver_fails_and_others_interfere(setup in setup(), ops in prop::collection::vec(disturbed(), 1..120)) {
        check(setup, &ops)?;
    }
}

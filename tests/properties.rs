//! Random sequences of operations against the shadow allocator.

use proptest::prelude::*;
use vrampool::driver::sim::{SimConfig, SimDriver};
use vrampool::testing::{Op, Setup, Size, encode, run};
use vrampool::units::DeviceId;
use vrampool::{Device, Pool};

fn size() -> impl Strategy<Value = Size> {
    // Slots, grains, pages; and what lies round their edges.
    let exact =
        prop::sample::select(vec![8u8, 9, 13, 14, 15, 16, 17, 20, 21, 22, 24, 25]).prop_map(|exponent| Size { exponent, fraction: 0 });
    let anything = (0..27u8, any::<u16>()).prop_map(|(exponent, fraction)| Size { exponent, fraction });
    let large = (19..26u8, any::<u16>()).prop_map(|(exponent, fraction)| Size { exponent, fraction });
    prop_oneof![2 => exact, 3 => anything, 3 => large]
}

fn allocate() -> impl Strategy<Value = Op> {
    let contiguous = prop::bool::weighted(0.15);
    allocate_of(size(), contiguous)
}

/// Requests of about a page to eight, most of them on one handle: handles of several pages, side by side.
fn allocate_on_handles() -> impl Strategy<Value = Op> {
    let size = (20..24u8, any::<u16>()).prop_map(|(exponent, fraction)| Size { exponent, fraction });
    prop_oneof![
        8 => allocate_of(size, prop::bool::weighted(0.8)),
        7 => any::<u16>().prop_map(|which| Op::Free { which }),
    ]
}

/// Large blocks that come and go, so that pages are moved, and calls that fail meanwhile: those that make and map, so that
/// what the failure undid can be undone.
fn moved_amid_failures() -> impl Strategy<Value = Op> {
    let size = (20..24u8, any::<u16>()).prop_map(|(exponent, fraction)| Size { exponent, fraction });
    prop_oneof![
        8 => allocate_of(size, Just(false)),
        7 => any::<u16>().prop_map(|which| Op::Free { which }),
        2 => (1..4u8, 0..12u8, any::<bool>()).prop_map(|(call, after, fatal)| Op::Fail { call, after, fatal }),
    ]
}

fn allocate_of(size: impl Strategy<Value = Size>, contiguous: impl Strategy<Value = bool>) -> impl Strategy<Value = Op> {
    let alignment = prop_oneof![4 => Just(0u8), 1 => 1..24u8];
    (size, alignment, any::<bool>(), contiguous).prop_map(|(size, alignment, buffer, contiguous)| Op::Allocate {
        size,
        alignment,
        buffer,
        contiguous,
    })
}

fn draw() -> impl Strategy<Value = Op> {
    let alignment = prop_oneof![2 => Just(0u8), 1 => 1..24u8];
    (any::<u8>(), size(), alignment, any::<bool>()).prop_map(|(which, size, alignment, buffer)| Op::Draw { which, size, alignment, buffer })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => allocate(),
        8 => any::<u16>().prop_map(|which| Op::Free { which }),
        1 => any::<u16>().prop_map(|which| Op::FreeUnderBuffer { which }),
        1 => (any::<u16>(), prop::sample::select(vec![0u16, 1, 255, 256, 257, 1024, 16384])).prop_map(|(which, offset)| Op::FreeInvalid { which, offset }),
        1 => size().prop_map(|size| Op::Reserve { size }),
        2 => draw(),
        1 => any::<u8>().prop_map(|which| Op::EndReservation { which }),
        3 => (any::<u16>(), size()).prop_map(|(which, size)| Op::Grow { which, size }),
        1 => (0..8u8).prop_map(|pages| Op::Trim { pages }),
        1 => (0..20u8, any::<bool>()).prop_map(|(pages, shared)| Op::SetMaximum { pages, shared }),
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

/// A pool of one stretch of memory, all of it taken at once.
fn full_pool(pages: u64) -> Pool {
    let bytes = pages * (2 << 20);
    let sim = SimDriver::new(SimConfig::default().capacity(bytes));
    let device = Device::new(sim, DeviceId(0)).expect("the device is there");
    Pool::builder().device(device).initial(bytes).maximum(bytes).build().expect("the memory is there")
}

proptest! {
    /// Blocks are allocated until one fails, and freed in any order: one stretch is left, as long as at the beginning.
    #[test]
    fn free_blocks_join_again_whatever_the_order(pages in 1..12u64, sizes in prop::collection::vec(size(), 1..200), order in any::<u64>()) {
        let pool = full_pool(pages);
        let whole = pool.statistics().largest_free_bytes;
        prop_assert_eq!(whole, pages << 21);
        let mut blocks: Vec<_> = sizes.iter().map_while(|size| pool.allocate_buffer(size.bytes()).ok()).collect();
        let mut state = order | 1;
        while !blocks.is_empty() {
            // A linear congruential step: the high bits say which is next.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let which = (state >> 33) as usize % blocks.len();
            blocks.swap_remove(which).free().expect("the block is live");
            pool.check().map_err(TestCaseError::fail)?;
        }
        prop_assert_eq!(pool.statistics().largest_free_bytes, whole);
        prop_assert_eq!(pool.statistics().free_bytes, whole);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn a_pool_keeps_its_promises(setup in setup(), ops in prop::collection::vec(op(), 1..120)) {
        check(setup, &ops)?;
    }

    #[test]
    fn blocks_on_one_handle_keep_theirs(memory_pages in 8..40u8, ops in prop::collection::vec(allocate_on_handles(), 1..120)) {
        check(Setup { memory_pages, ..Setup::default() }, &ops)?;
    }

    #[test]
    fn what_is_moved_while_the_driver_fails_is_where_it_was(memory_pages in 8..40u8, ops in prop::collection::vec(moved_amid_failures(), 1..120)) {
        check(Setup { memory_pages, ..Setup::default() }, &ops)?;
    }

    #[test]
    fn a_pool_keeps_its_promises_while_the_driver_fails_and_others_interfere(setup in setup(), ops in prop::collection::vec(disturbed(), 1..120)) {
        check(setup, &ops)?;
    }
}

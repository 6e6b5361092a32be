//! The classic buddy allocator against a brute-force oracle and a shadow.

use proptest::prelude::*;
use std::collections::{BTreeMap, HashSet};
use vrampool::buddy::classic::{ClassicBuddy, Tails};
use vrampool::error::InvalidFree;

const BOTH: [Tails; 2] = [Tails::Kept, Tails::GivenBack];

/// What a buddy allocator's state means, without its data structures: which grains are taken. The free blocks are the
/// aligned powers of two that lie wholly in free grains and in no larger one that does.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Oracle {
    taken: Vec<bool>,
    live: BTreeMap<usize, usize>,
    tails: Tails,
}

impl Oracle {
    fn new(grains: usize, tails: Tails) -> Self {
        Self { taken: vec![false; grains], live: BTreeMap::new(), tails }
    }

    fn is_free(&self, offset: usize, grains: usize) -> bool {
        offset + grains <= self.taken.len() && self.taken[offset..offset + grains].iter().all(|taken| !taken)
    }

    /// The free blocks as `(grains, offset)`, smallest and lowest first.
    fn free_blocks(&self) -> Vec<(usize, usize)> {
        let powers = (0..).map(|order| 1usize << order).take_while(|&grains| grains <= self.taken.len());
        powers
            .flat_map(|grains| (0..self.taken.len()).step_by(grains).map(move |offset| (grains, offset)))
            .filter(|&(grains, offset)| self.is_free(offset, grains) && !self.is_free(offset & !(2 * grains - 1), 2 * grains))
            .collect()
    }

    fn allocate(&mut self, grains: usize) -> Option<usize> {
        let rounded = grains.next_power_of_two();
        let (_, offset) = self.free_blocks().into_iter().find(|&(size, _)| grains > 0 && size >= rounded)?;
        let kept = if self.tails == Tails::Kept { rounded } else { grains };
        self.taken[offset..offset + kept].fill(true);
        self.live.insert(offset, kept);
        Some(offset)
    }

    fn free(&mut self, offset: usize) -> Result<usize, InvalidFree> {
        if offset >= self.taken.len() {
            return Err(InvalidFree::Foreign);
        }
        let Some(grains) = self.live.remove(&offset) else {
            return Err(if self.taken[offset] { InvalidFree::Interior } else { InvalidFree::NotLive });
        };
        self.taken[offset..offset + grains].fill(false);
        Ok(grains)
    }
}

fn assert_same(buddy: &ClassicBuddy, oracle: &Oracle) {
    buddy.check().unwrap();
    let free: Vec<(usize, usize)> = buddy.free_blocks().map(|(offset, grains)| (grains as usize, offset as usize)).collect();
    assert_eq!(free, oracle.free_blocks());
    let live: Vec<(usize, usize)> = buddy.live_blocks().map(|(offset, grains)| (offset as usize, grains as usize)).collect();
    assert_eq!(live, oracle.live.iter().map(|(&offset, &grains)| (offset, grains)).collect::<Vec<_>>());
    let statistics = buddy.statistics();
    assert_eq!(statistics.live as usize, oracle.taken.iter().filter(|taken| **taken).count());
    assert_eq!(statistics.live + statistics.free, oracle.taken.len() as u64);
    assert_eq!(statistics.largest_free as usize, free.last().map_or(0, |last| last.0));
    assert_eq!(statistics.allocations, live.len());
}

/// Every state that some sequence of operations leads to, and from each every operation, valid or not.
#[test]
fn every_reachable_state_of_small_ranges() {
    for tails in BOTH {
        for grains in 0..=9 {
            let mut seen = HashSet::new();
            let mut pending = vec![(ClassicBuddy::new(grains as u64, tails), Oracle::new(grains, tails))];
            while let Some((buddy, oracle)) = pending.pop() {
                if !seen.insert(oracle.clone()) {
                    continue;
                }
                assert_same(&buddy, &oracle);
                for size in 0..=grains + 1 {
                    let (mut buddy, mut oracle) = (buddy.clone(), oracle.clone());
                    let expected = oracle.allocate(size);
                    assert_eq!(buddy.allocate(size as u64).map(|offset| offset as usize), expected, "{size} of {oracle:?}");
                    if expected.is_some() {
                        pending.push((buddy, oracle));
                    }
                }
                for offset in 0..=grains + 1 {
                    let (mut next, mut expected) = (buddy.clone(), oracle.clone());
                    let result = expected.free(offset);
                    assert_eq!(next.free(offset as u64).map(|grains| grains as usize), result, "{offset} of {oracle:?}");
                    match result {
                        Ok(_) => pending.push((next, expected)),
                        Err(_) => assert_eq!(next, buddy, "a refused free changes nothing"),
                    }
                }
            }
            assert!(grains < 8 || seen.len() > 100, "only {} states of {grains} grains", seen.len());
        }
    }
}

#[test]
fn four_quarters_freed_in_every_order_are_one_block() {
    for tails in BOTH {
        for first in 0..4 {
            for second in 0..4 {
                for third in 0..4 {
                    let order = [first, second, third, 6u64.wrapping_sub(first + second + third)];
                    if order.iter().collect::<HashSet<_>>().len() < 4 {
                        continue;
                    }
                    let mut buddy = ClassicBuddy::new(32, tails);
                    for quarter in 0..4 {
                        assert_eq!(buddy.allocate(8), Some(8 * quarter));
                    }
                    for quarter in order {
                        assert_eq!(buddy.free(8 * quarter), Ok(8));
                        buddy.check().unwrap();
                    }
                    assert_eq!(buddy, ClassicBuddy::new(32, tails), "{order:?}");
                    assert_eq!(buddy.free_blocks().collect::<Vec<_>>(), [(0, 32)]);
                }
            }
        }
    }
}

#[test]
fn a_range_that_is_no_power_of_two_never_grows_one() {
    for tails in BOTH {
        let mut buddy = ClassicBuddy::new(48, tails);
        assert_eq!(buddy.free_blocks().collect::<Vec<_>>(), [(32, 16), (0, 32)]);
        assert_eq!(buddy.allocate(33), None);
        assert_eq!((buddy.allocate(32), buddy.allocate(16), buddy.allocate(1)), (Some(0), Some(32), None));
        assert_eq!((buddy.free(32), buddy.free(0)), (Ok(16), Ok(32)));
        assert_eq!(buddy, ClassicBuddy::new(48, tails));
    }
}

#[test]
fn every_order() {
    for tails in BOTH {
        for order in 0..u64::BITS {
            let grains = 1u64 << order;
            let mut buddy = ClassicBuddy::new(grains, tails);
            assert_eq!(buddy.allocate(0), None);
            assert_eq!(grains.checked_add(1).and_then(|more| buddy.allocate(more)), None);
            assert_eq!(buddy.allocate(u64::MAX), None);
            for smaller in 0..=order {
                let block = 1u64 << smaller;
                assert_eq!(buddy.allocate(block), Some(0));
                assert_eq!(buddy.free_blocks().count() as u32, order - smaller, "one buddy for each halving");
                buddy.check().unwrap();
                assert_eq!(buddy.free(0), Ok(block));
                assert_eq!(buddy, ClassicBuddy::new(grains, tails));
            }
        }
    }
    assert_eq!(ClassicBuddy::new(u64::MAX, Tails::Kept).free_blocks().count(), 64);
    assert_eq!(ClassicBuddy::new(0, Tails::Kept).allocate(1), None);
}

#[test]
fn a_tail_comes_back_in_pieces() {
    let mut buddy = ClassicBuddy::new(64, Tails::GivenBack);
    assert_eq!(buddy.allocate(33), Some(0));
    assert_eq!(buddy.free_blocks().collect::<Vec<_>>(), [(33, 1), (34, 2), (36, 4), (40, 8), (48, 16)]);
    assert_eq!(buddy.statistics().live, 33);
    assert_eq!(buddy.free(33), Err(InvalidFree::NotLive), "a tail is not live");
    assert_eq!(buddy.free(32), Err(InvalidFree::Interior));
    assert_eq!(buddy.free(0), Ok(33));
    assert_eq!(buddy, ClassicBuddy::new(64, Tails::GivenBack));

    let mut kept = ClassicBuddy::new(64, Tails::Kept);
    assert_eq!(kept.allocate(33), Some(0));
    assert_eq!(kept.statistics().live, 64);
    assert_eq!(kept.statistics().requested, 33);
    assert_eq!(kept.free(33), Err(InvalidFree::Interior), "a tail that is kept is the allocation's");
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Allocate(u64),
    Free(prop::sample::Index),
    FreeAnywhere(u64),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let size = prop_oneof![4 => 0..40u64, 2 => 40..700u64, 1 => any::<u64>()];
    prop::collection::vec(
        prop_oneof![
            5 => size.prop_map(Op::Allocate),
            4 => any::<prop::sample::Index>().prop_map(Op::Free),
            1 => (0..5000u64).prop_map(Op::FreeAnywhere),
        ],
        0..200,
    )
}

proptest! {
    #[test]
    fn no_overlap_and_nothing_lost(grains in 0..4200u64, tails in prop::sample::select(&BOTH[..]), ops in ops()) {
        let mut buddy = ClassicBuddy::new(grains, tails);
        let mut shadow: BTreeMap<u64, u64> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Allocate(size) => {
                    let largest = buddy.statistics().largest_free;
                    let Some(offset) = buddy.allocate(size) else {
                        prop_assert!(size == 0 || size.checked_next_power_of_two().is_none_or(|rounded| rounded > largest));
                        continue;
                    };
                    let kept = if tails == Tails::Kept { size.next_power_of_two() } else { size };
                    prop_assert!(offset % size.next_power_of_two() == 0 && offset + kept <= grains);
                    let before = shadow.range(..offset + kept).next_back();
                    prop_assert!(before.is_none_or(|(start, length)| start + length <= offset), "{offset} overlaps {before:?}");
                    shadow.insert(offset, kept);
                }
                Op::Free(_) if shadow.is_empty() => {}
                Op::Free(index) => {
                    let offset = *index.get(&shadow.keys().copied().collect::<Vec<_>>());
                    prop_assert_eq!(buddy.free(offset), Ok(shadow.remove(&offset).unwrap()));
                }
                Op::FreeAnywhere(offset) => {
                    let expected = match shadow.remove(&offset) {
                        Some(length) => Ok(length),
                        None if offset >= grains => Err(InvalidFree::Foreign),
                        None if shadow.range(..offset).next_back().is_some_and(|(start, length)| offset < start + length) => {
                            Err(InvalidFree::Interior)
                        }
                        None => Err(InvalidFree::NotLive),
                    };
                    prop_assert_eq!(buddy.free(offset), expected);
                }
            }
            buddy.check().map_err(TestCaseError::fail)?;
            prop_assert_eq!(buddy.statistics().live, shadow.values().sum::<u64>());
        }
        // With everything free, each top block can be had whole.
        for offset in shadow.into_keys() {
            prop_assert!(buddy.free(offset).is_ok());
        }
        prop_assert_eq!(&buddy, &ClassicBuddy::new(grains, tails));
        let mut end = 0;
        for order in (0..u64::BITS).rev().filter(|order| grains >> order & 1 == 1) {
            prop_assert_eq!(buddy.allocate(1 << order), Some(end));
            end += 1 << order;
        }
        prop_assert_eq!(buddy.statistics().free, 0);
    }
}

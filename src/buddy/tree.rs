//! The tree of free runs: a buddy tree without the buddy's alignment rule.
//!
//! ```text
//!              node: longest free run inside, free run at its head, free run at its tail   (grains)
//!             /    \
//!         buddy    buddy          a node covers a power-of-two range; its two children are buddies
//!         /   \    /   \
//!       leaf leaf leaf leaf       2 MiB = 128 grains, one bit a grain (1 = free)
//! ```
//!
//! A classic buddy system serves a request from one node's range. Here a run may cross buddies: the run that straddles
//! the middle of a node is the left child's tail joined with the right child's head, so a request takes exactly the
//! grains that it needs, at any grain, and the tree still finds, splits and merges in a walk from the root.
//!
//! # Invariants, each in [`RunTree::check`]
//!
//! - T1 A leaf's node is the summary of its bits; an inner node is the join of its children.
//! - T2 A *uniform* node, all free or all taken, speaks for its subtree: what is stored below it is stale. (So a run of
//!   any length is taken or given back in O(log n): whole subtrees are never visited.)
//! - T3 `free_grains` is the number of free grains.
//!
//! # Complexity
//! `insert`, `remove`, `first_fit`, `run_before`, `run_after`, `is_free`: O(log n) of the leaves. [`RunTree::visit`]:
//! O(runs visited × log n). Growing the range: O(n), doubling, so amortised O(1) a leaf.
//!
//! # What it does not do
//! It knows nothing of pages, addresses or who took a run. It is not synchronised.

use super::Run;
use crate::arena::MAX_GRAINS;

/// Grains in a leaf: one bit each of a `u128`.
pub const LEAF_GRAINS: u32 = 128;

/// What a node knows of the range it covers, in grains.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Summary {
    longest: u32,
    head: u32,
    tail: u32,
}

impl Summary {
    const fn uniform(free: bool, grains: u32) -> Self {
        let run = if free { grains } else { 0 };
        Self { longest: run, head: run, tail: run }
    }

    fn of_leaf(bits: u128) -> Self {
        Self { longest: longest_run(bits), head: bits.trailing_ones(), tail: bits.leading_ones() }
    }

    /// The summary of a node whose children each cover `half` grains.
    fn join(left: Self, right: Self, half: u32) -> Self {
        let across = if cfg!(vrampool_fault = "merge_skips_neighbour") { 0 } else { left.tail + right.head };
        Self {
            longest: left.longest.max(right.longest).max(across),
            head: if left.head == half { half + right.head } else { left.head },
            tail: if right.tail == half { half + left.tail } else { right.tail },
        }
    }

    const fn is_uniform(self, grains: u32) -> bool {
        self.longest == 0 || self.longest == grains
    }
}

/// The length of the longest run of ones, in seven steps whatever the bits.
fn longest_run(bits: u128) -> u32 {
    if bits == 0 || bits == u128::MAX {
        return bits.count_ones();
    }
    // level[k]: bit p is set where a run of 2^k begins at p.
    let mut level = [bits; 7];
    let mut top = 0;
    while top < 6 {
        let next = level[top] & (level[top] >> (1 << top));
        if next == 0 {
            break;
        }
        top += 1;
        level[top] = next;
    }
    let mut begins = level[top];
    let mut length = 1u32 << top;
    for k in (0..top).rev() {
        let longer = begins & (level[k] >> length);
        if longer != 0 {
            begins = longer;
            length += 1 << k;
        }
    }
    length
}

/// The lowest bit at which a run of `count` ones (1 to 128) begins.
fn first_run(bits: u128, count: u32) -> Option<u32> {
    let mut begins = bits;
    let mut length = 1;
    while length < count {
        let step = length.min(count - length);
        begins &= begins >> step;
        length += step;
    }
    (begins != 0).then(|| begins.trailing_zeros())
}

/// Ones in bits `from..to` (0 to 128).
fn mask(from: u32, to: u32) -> u128 {
    let below = |n: u32| if n == LEAF_GRAINS { u128::MAX } else { (1 << n) - 1 };
    below(to) & !below(from)
}

/// The free runs over a range of grains that starts at 0 and grows as used. See the module's documentation.
#[derive(Clone, Debug)]
pub struct RunTree {
    /// Heap order: node 1 is the root, node `i` has the children `2i` and `2i + 1`; the leaves' nodes come last.
    nodes: Vec<Summary>,
    leaves: Vec<u128>,
    free_grains: u64,
}

impl Default for RunTree {
    fn default() -> Self {
        Self::new()
    }
}

impl RunTree {
    /// A tree without a free grain.
    #[must_use]
    pub fn new() -> Self {
        Self { nodes: vec![Summary::default(); 2], leaves: vec![0; 1], free_grains: 0 }
    }

    /// The number of free grains.
    #[must_use]
    pub const fn free_grains(&self) -> u64 {
        self.free_grains
    }

    /// The length of the longest free run, in grains.
    #[must_use]
    pub fn longest(&self) -> u32 {
        self.nodes[1].longest
    }

    fn grains(&self) -> u32 {
        self.leaves.len() as u32 * LEAF_GRAINS
    }

    /// Doubles the range until it holds grain `end - 1`.
    fn cover(&mut self, end: u32) {
        assert!(end <= MAX_GRAINS, "runs end at {} grains at the most", MAX_GRAINS);
        while self.grains() < end {
            let old = self.leaves.len();
            let mut nodes = vec![Summary::default(); old * 4];
            // Each level of the old tree becomes the left half of a level of the new one.
            let mut width = 1;
            while width <= old {
                nodes[2 * width..3 * width].copy_from_slice(&self.nodes[width..2 * width]);
                width *= 2;
            }
            nodes[1] = Summary::join(nodes[2], nodes[3], self.grains());
            self.nodes = nodes;
            self.leaves.resize(old * 2, 0);
        }
    }

    /// Makes a run free. It joins its free neighbours.
    ///
    /// # Panics
    /// When a grain of the run is free already.
    pub fn insert(&mut self, run: Run) {
        if run.is_empty() {
            return;
        }
        self.cover(run.end());
        self.free_grains += u64::from(run.len);
        self.assign(1, 0, self.grains(), run, true);
    }

    /// Takes a run out.
    ///
    /// # Panics
    /// When a grain of the run is not free.
    pub fn remove(&mut self, run: Run) {
        if run.is_empty() {
            return;
        }
        assert!(run.end() <= self.grains(), "{run:?} is not free");
        self.free_grains -= u64::from(run.len);
        self.assign(1, 0, self.grains(), run, false);
    }

    fn assign(&mut self, node: usize, start: u32, grains: u32, run: Run, free: bool) {
        let summary = self.nodes[node];
        if run.start <= start && start + grains <= run.end() {
            assert!(summary == Summary::uniform(!free, grains), "{run:?} is {} already in part", if free { "free" } else { "taken" });
            self.nodes[node] = Summary::uniform(free, grains);
            return;
        }
        if grains == LEAF_GRAINS {
            let leaf = node - self.leaves.len();
            let stored = match summary.longest {
                0 => 0,
                LEAF_GRAINS => u128::MAX,
                _ => self.leaves[leaf],
            };
            let to = (run.end() - start).min(LEAF_GRAINS);
            let to = if cfg!(vrampool_fault = "leaf_edge") && to == LEAF_GRAINS && free { to - 1 } else { to };
            let part = mask(run.start.max(start) - start, to);
            let expected = if free { 0 } else { part };
            assert!(stored & part == expected, "{run:?} is {} already in part", if free { "free" } else { "taken" });
            self.leaves[leaf] = stored ^ part;
            self.nodes[node] = Summary::of_leaf(stored ^ part);
            return;
        }
        let half = grains / 2;
        if summary.is_uniform(grains) {
            let child = Summary::uniform(summary.longest != 0, half);
            self.nodes[2 * node] = child;
            self.nodes[2 * node + 1] = child;
        }
        let middle = start + half;
        if run.start < middle {
            self.assign(2 * node, start, half, run, free);
        }
        if run.end() > middle {
            self.assign(2 * node + 1, middle, half, run, free);
        }
        self.nodes[node] = Summary::join(self.nodes[2 * node], self.nodes[2 * node + 1], half);
    }

    /// The lowest run of at least `count` free grains: its first grain.
    #[must_use]
    pub fn first_fit(&self, count: u32) -> Option<u32> {
        if count == 0 || self.nodes[1].longest < count {
            return None;
        }
        let (mut node, mut start, mut grains) = (1, 0, self.grains());
        loop {
            if self.nodes[node].longest == grains {
                return Some(start);
            }
            if grains == LEAF_GRAINS {
                let bits = self.leaves[node - self.leaves.len()];
                return first_run(bits, count).map(|bit| start + bit);
            }
            grains /= 2;
            let (left, right) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
            if left.longest >= count {
                node *= 2;
            } else if left.tail + right.head >= count {
                return Some(start + grains - left.tail);
            } else {
                node = 2 * node + 1;
                start += grains;
            }
        }
    }

    /// Whether every grain of the run is free.
    #[must_use]
    pub fn is_free(&self, run: Run) -> bool {
        self.run_after(run.start).len >= run.len
    }

    /// The free run that ends right before `grain`; empty where there is none.
    #[must_use]
    pub fn run_before(&self, grain: u32) -> Run {
        let grain_in = grain.min(self.grains());
        let length = if grain_in < grain { 0 } else { self.tail_of(1, self.grains(), grain_in) };
        Run { start: grain - length, len: length }
    }

    /// The free grains right before `end`, within a node.
    fn tail_of(&self, node: usize, grains: u32, end: u32) -> u32 {
        let summary = self.nodes[node];
        if end == grains {
            return summary.tail;
        }
        if end == 0 || summary.is_uniform(grains) {
            return summary.longest.min(end);
        }
        if grains == LEAF_GRAINS {
            let bits = self.leaves[node - self.leaves.len()];
            return (bits << (LEAF_GRAINS - end)).leading_ones();
        }
        let half = grains / 2;
        if end <= half {
            return self.tail_of(2 * node, half, end);
        }
        let right = self.tail_of(2 * node + 1, half, end - half);
        if right == end - half { right + self.nodes[2 * node].tail } else { right }
    }

    /// The free run that begins at `grain`; empty where `grain` is not free.
    #[must_use]
    pub fn run_after(&self, grain: u32) -> Run {
        let length = if grain >= self.grains() { 0 } else { self.head_of(1, self.grains(), grain) };
        Run { start: grain, len: length }
    }

    /// The free grains from `from` on, within a node.
    fn head_of(&self, node: usize, grains: u32, from: u32) -> u32 {
        let summary = self.nodes[node];
        if from == 0 {
            return summary.head;
        }
        if summary.is_uniform(grains) {
            return summary.longest.saturating_sub(from);
        }
        if grains == LEAF_GRAINS {
            let bits = self.leaves[node - self.leaves.len()];
            return (bits >> from).trailing_ones();
        }
        let half = grains / 2;
        if from >= half {
            return self.head_of(2 * node + 1, half, from - half);
        }
        let left = self.head_of(2 * node, half, from);
        if left == half - from { left + self.nodes[2 * node + 1].head } else { left }
    }

    /// The whole free run around `grain`; empty where `grain` is not free.
    #[must_use]
    pub fn run_around(&self, grain: u32) -> Run {
        let after = self.run_after(grain);
        if after.is_empty() {
            return after;
        }
        let before = self.run_before(grain);
        Run { start: before.start, len: before.len + after.len }
    }

    /// Calls `found` with each whole free run of at least `min` grains, lowest first, until it returns `false`.
    pub fn visit(&self, min: u32, mut found: impl FnMut(Run) -> bool) {
        let mut open = None;
        if self.visit_node(1, 0, self.grains(), min.max(1), &mut open, &mut found) {
            close(&mut open, self.grains(), min.max(1), &mut found);
        }
    }

    fn visit_node(
        &self,
        node: usize,
        start: u32,
        grains: u32,
        min: u32,
        open: &mut Option<u32>,
        found: &mut impl FnMut(Run) -> bool,
    ) -> bool {
        let summary = self.nodes[node];
        if summary.longest == grains {
            open.get_or_insert(start);
            return true;
        }
        if summary.longest < min {
            // No run inside is long enough by itself; its ends may be with what lies beside them.
            if summary.head > 0 {
                open.get_or_insert(start);
            }
            let going_on = close(open, start + summary.head, min, found);
            if summary.tail > 0 {
                *open = Some(start + grains - summary.tail);
            }
            return going_on;
        }
        if grains > LEAF_GRAINS {
            let half = grains / 2;
            return self.visit_node(2 * node, start, half, min, open, found)
                && self.visit_node(2 * node + 1, start + half, half, min, open, found);
        }
        let bits = self.leaves[node - self.leaves.len()];
        let mut at = 0;
        while at < LEAF_GRAINS {
            let ones = (bits >> at).trailing_ones();
            if ones > 0 {
                open.get_or_insert(start + at);
                at += ones;
            }
            if at < LEAF_GRAINS {
                if !close(open, start + at, min, found) {
                    return false;
                }
                at += (bits >> at).trailing_zeros().min(LEAF_GRAINS - at);
            }
        }
        true
    }

    /// Checks T1 to T3.
    ///
    /// # Errors
    /// The first violation found.
    pub fn check(&self) -> Result<(), String> {
        let free = self.check_node(1, self.grains())?;
        if free != self.free_grains {
            return Err(format!("T3: {free} grains are free, {} are counted", self.free_grains));
        }
        Ok(())
    }

    fn check_node(&self, node: usize, grains: u32) -> Result<u64, String> {
        let summary = self.nodes[node];
        if summary.is_uniform(grains) {
            let expected = Summary::uniform(summary.longest != 0, grains);
            return if summary == expected { Ok(u64::from(summary.longest)) } else { Err(format!("T2: node {node} is {summary:?}")) };
        }
        let (expected, free) = if grains == LEAF_GRAINS {
            let bits = self.leaves[node - self.leaves.len()];
            (Summary::of_leaf(bits), u64::from(bits.count_ones()))
        } else {
            let free = self.check_node(2 * node, grains / 2)? + self.check_node(2 * node + 1, grains / 2)?;
            (Summary::join(self.nodes[2 * node], self.nodes[2 * node + 1], grains / 2), free)
        };
        if summary == expected { Ok(free) } else { Err(format!("T1: node {node} is {summary:?}, not {expected:?}")) }
    }
}

/// Ends the open run before `end`, and reports it where it is long enough.
fn close(open: &mut Option<u32>, end: u32, min: u32, found: &mut impl FnMut(Run) -> bool) -> bool {
    match open.take() {
        Some(start) if end - start >= min => found(Run { start, len: end - start }),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The leaf functions on the mask with these runs, which neither touch nor overlap, lowest first.
    fn check_mask(runs: &[(u32, u32)]) {
        let bits = runs.iter().fold(0, |bits, &(from, to)| bits | mask(from, to));
        let longest = runs.iter().map(|&(from, to)| to - from).max().unwrap_or(0);
        assert_eq!(longest_run(bits), longest, "{bits:#x}");
        // The count that each run just meets, just misses, and the extremes.
        let counts = runs.iter().flat_map(|&(from, to)| [to - from, to - from + 1]).chain([1, 64, LEAF_GRAINS]);
        for count in counts.filter(|&count| count <= LEAF_GRAINS) {
            let first = runs.iter().find(|&&(from, to)| to - from >= count).map(|&(from, _)| from);
            assert_eq!(first_run(bits, count), first, "{bits:#x} {count}");
        }
        let summary = Summary::of_leaf(bits);
        assert_eq!(summary.head, runs.first().filter(|run| run.0 == 0).map_or(0, |run| run.1));
        assert_eq!(summary.tail, runs.last().filter(|run| run.1 == LEAF_GRAINS).map_or(0, |run| run.1 - run.0));
    }

    /// Every mask with one run and every mask with two: eleven million.
    #[test]
    fn leaf_functions_are_right_on_every_mask_with_up_to_two_runs() {
        check_mask(&[]);
        for a in 0..LEAF_GRAINS {
            for b in a + 1..=LEAF_GRAINS {
                check_mask(&[(a, b)]);
                for c in b + 1..LEAF_GRAINS {
                    for d in c + 1..=LEAF_GRAINS {
                        check_mask(&[(a, b), (c, d)]);
                    }
                }
            }
        }
    }

    /// Every mask with three runs whose edges lie at or beside a multiple of 16: the words' halves among them.
    #[test]
    fn leaf_functions_are_right_on_masks_with_three_runs() {
        let edges: Vec<u32> = (0..=LEAF_GRAINS).filter(|edge| [0, 1, 15].contains(&(edge % 16))).collect();
        for (i, &a) in edges.iter().enumerate() {
            for (j, &b) in edges.iter().enumerate().skip(i + 1) {
                for (k, &c) in edges.iter().enumerate().skip(j + 1) {
                    for (l, &d) in edges.iter().enumerate().skip(k + 1) {
                        for (m, &e) in edges.iter().enumerate().skip(l + 1) {
                            for &f in &edges[m + 1..] {
                                check_mask(&[(a, b), (c, d), (e, f)]);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_run_of_a_small_tree_is_taken_and_given_back() {
        let all = Run { start: 0, len: 4 * LEAF_GRAINS };
        let edges = [0, 1, 2, 63, 64, 127, 128, 129, 191, 255, 256, 257, 383, 384, 385, 510, 511, 512];
        for &from in &edges {
            for &to in edges.iter().filter(|&&to| to > from) {
                let run = Run { start: from, len: to - from };
                let mut tree = RunTree::new();
                tree.insert(all);
                tree.remove(run);
                tree.check().unwrap();
                assert_eq!(tree.longest(), from.max(all.len - to));
                assert_eq!(tree.run_before(from), Run { start: 0, len: from });
                assert_eq!(tree.run_after(to), Run { start: to, len: all.len - to });
                tree.insert(run);
                tree.check().unwrap();
                assert_eq!(tree.first_fit(all.len), Some(0));
                assert_eq!(tree.run_around(from), all);
            }
        }
    }

    #[test]
    #[should_panic(expected = "free already in part")]
    fn a_run_is_not_given_back_twice() {
        let mut tree = RunTree::new();
        tree.insert(Run { start: 100, len: 100 });
        tree.insert(Run { start: 199, len: 300 });
    }

    #[test]
    #[should_panic(expected = "taken already in part")]
    fn a_run_is_not_taken_twice() {
        let mut tree = RunTree::new();
        tree.insert(Run { start: 0, len: 256 });
        tree.remove(Run { start: 0, len: 130 });
        tree.remove(Run { start: 129, len: 2 });
    }

    const SPACE: u32 = 9 * LEAF_GRAINS;

    fn naive_runs(free: &[bool], min: u32) -> Vec<Run> {
        let mut runs = Vec::new();
        let mut start = 0;
        for at in 0..=free.len() {
            if at == free.len() || !free[at] {
                if at - start >= min.max(1) as usize {
                    runs.push(Run { start: start as u32, len: (at - start) as u32 });
                }
                start = at + 1;
            }
        }
        runs
    }

    proptest! {
        /// The tree against one `bool` a grain, over every question that it answers.
        #[test]
        fn the_tree_agrees_with_a_plain_array(flips in prop::collection::vec((0..SPACE, 1..400u32), 1..60), probes in prop::collection::vec(0..SPACE, 8)) {
            let mut free = vec![false; SPACE as usize];
            let mut tree = RunTree::new();
            for (start, len) in flips {
                // The longest stretch of one state from `start` on, at most `len`, changes state.
                let state = free[start as usize];
                let end = (start..SPACE.min(start + len)).find(|&g| free[g as usize] != state).unwrap_or(SPACE.min(start + len));
                let run = Run { start, len: end - start };
                if state { tree.remove(run) } else { tree.insert(run) }
                free[start as usize..end as usize].fill(!state);
                tree.check().unwrap();
                let runs = naive_runs(&free, 1);
                prop_assert_eq!(tree.longest(), runs.iter().map(|r| r.len).max().unwrap_or(0));
                for min in [1, 2, 64, 128, 129, 300] {
                    let mut seen = Vec::new();
                    tree.visit(min, |run| { seen.push(run); true });
                    let expected = naive_runs(&free, min);
                    prop_assert_eq!(tree.first_fit(min), expected.first().map(|r| r.start));
                    prop_assert_eq!(seen, expected);
                }
                for &probe in &probes {
                    let around = runs.iter().find(|r| r.contains(probe)).copied();
                    prop_assert_eq!(Some(tree.run_around(probe)).filter(|r| !r.is_empty()), around);
                    let before = runs.iter().find(|r| r.start < probe && r.end() >= probe).map_or(0, |r| probe - r.start);
                    prop_assert_eq!(tree.run_before(probe), Run { start: probe - before, len: before });
                }
            }
        }
    }
}

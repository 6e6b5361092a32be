//! Every short sequence of requests and frees on a pool of a few pages, against brute force.
//!
//! A request may fail only where there is no place for it: a stretch of addresses that no live block lies in, whose pages,
//! with those of the live blocks, are no more than the capacity. Pages without a live block can be mapped anywhere.

use std::collections::BTreeSet;
use std::sync::Arc;
use vrampool::driver::Driver;
use vrampool::driver::sim::{SimConfig, SimDriver};
use vrampool::units::DeviceId;
use vrampool::{Device, DeviceBuffer, Pool};

const DEVICE: DeviceId = DeviceId(0);
const GRAIN: u64 = 16 << 10;
const PAGE: u64 = 2 << 20;

/// The smallest run; half a page, one, one and a half, two: no slab serves any.
const SIZES: [u64; 5] = [5 * GRAIN, PAGE / 2, PAGE, PAGE + PAGE / 2, 2 * PAGE];

/// A live block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Block {
    start: u64,
    bytes: u64,
}

impl Block {
    fn end(self) -> u64 {
        self.start + self.bytes
    }

    fn pages(self) -> impl Iterator<Item = u64> {
        self.start / PAGE..self.end().div_ceil(PAGE)
    }
}

fn pages(blocks: &[Block]) -> BTreeSet<u64> {
    blocks.iter().flat_map(|block| block.pages()).collect()
}

/// Whether there is a place for a request, from the pool's lowest address on.
fn has_place(blocks: &[Block], base: u64, bytes: u64, capacity: u64) -> bool {
    let live = pages(blocks);
    let behind = live.last().map_or(base, |page| (page + 1) * PAGE);
    (base..=behind).step_by(GRAIN as usize).any(|start| {
        let wanted = Block { start, bytes };
        blocks.iter().all(|block| block.end() <= start || wanted.end() <= block.start)
            && (live.len() + wanted.pages().filter(|page| !live.contains(page)).count()) as u64 <= capacity
    })
}

/// A pool beside its live blocks.
struct Bench {
    sim: Arc<SimDriver>,
    pool: Pool,
    capacity: u64,
    base: Option<u64>,
    blocks: Vec<Block>,
    buffers: Vec<DeviceBuffer>,
}

impl Bench {
    /// `by_device`: the device has no more memory than that; otherwise the pool's maximum says so.
    fn new(capacity: u64, by_device: bool) -> Self {
        let memory = if by_device { capacity } else { 4 * capacity };
        let sim = SimDriver::new(SimConfig::default().capacity(memory * PAGE));
        let device = Device::new(Arc::clone(&sim) as Arc<dyn Driver>, DEVICE).expect("the device is there");
        let builder = Pool::builder().device(device);
        let builder = if by_device { builder } else { builder.maximum(capacity * PAGE) };
        let pool = builder.build().expect("nothing is asked for yet");
        Self { sim, pool, capacity, base: None, blocks: Vec::new(), buffers: Vec::new() }
    }

    fn allocate(&mut self, bytes: u64) {
        // The first block lies where the addresses begin.
        let place = self.base.map_or(bytes <= self.capacity * PAGE, |base| has_place(&self.blocks, base, bytes, self.capacity));
        match self.pool.allocate_buffer(bytes) {
            Ok(buffer) => {
                let block = Block { start: buffer.address().address(), bytes };
                self.base.get_or_insert(block.start);
                assert!(place, "{block:?} beside {:?}", self.blocks);
                assert!(self.blocks.iter().all(|other| other.end() <= block.start || block.end() <= other.start));
                assert!(self.sim.is_writable(DEVICE, buffer.address(), bytes));
                self.blocks.push(block);
                self.buffers.push(buffer);
            }
            Err(error) => assert!(error.is_out_of_memory() && !place, "{error}, beside {:?}", self.blocks),
        }
        let most = self.sim.peak_bytes(DEVICE);
        assert!(most <= self.capacity * PAGE, "{most} bytes were held");
    }

    fn free(&mut self, which: usize) {
        self.blocks.remove(which);
        self.buffers.remove(which).free().expect("the block is live");
    }

    /// Numbers below 5 stand for requests, the others for the live blocks to be freed. What is left out for want of a block.
    fn run(&mut self, ops: &[usize]) -> Result<(), usize> {
        for (at, &op) in ops.iter().enumerate() {
            match op.checked_sub(SIZES.len()) {
                None => self.allocate(SIZES[op]),
                Some(which) if which < self.blocks.len() => self.free(which),
                Some(_) => return Err(at),
            }
            self.pool.check().expect("the invariants hold");
        }
        Ok(())
    }

    /// What is left when all is freed: bytes held, free, and in the longest free run.
    fn end(mut self) -> (u64, u64, u64) {
        while !self.buffers.is_empty() {
            self.free(0);
        }
        self.pool.check().expect("the invariants hold");
        let left = self.pool.statistics();
        assert_eq!((left.live_bytes, left.free_bytes, left.reserved_bytes), (0, left.reserved_bytes, self.sim.held_bytes(DEVICE)));
        self.pool.allocate_buffer(self.capacity * PAGE).expect("all memory serves one request").free().expect("it is live");
        (left.reserved_bytes, left.free_bytes, left.largest_free_bytes)
    }
}

/// Runs every sequence of this length, and counts them.
fn every_sequence(length: usize, run: &mut dyn FnMut(&[usize]) -> Result<(), usize>) -> u64 {
    let mut ops = vec![0; length];
    let mut count = 0;
    loop {
        let ran = run(&ops);
        count += u64::from(ran.is_ok());
        // Where a sequence breaks off, so do all that begin as it does.
        let last = ran.err().unwrap_or(length - 1);
        // There are at most as many blocks as operations before.
        let Some(next) = (0..=last).rev().find(|&at| ops[at] + 1 < SIZES.len() + at) else { return count };
        ops[next] += 1;
        ops[next + 1..].fill(0);
    }
}

fn every_order(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let insert = |order: &Vec<usize>, at: usize| [&order[..at], &[count - 1], &order[at..]].concat();
    every_order(count - 1).iter().flat_map(|order| (0..count).map(move |at| insert(order, at))).collect()
}

#[test]
fn a_request_fails_only_where_there_is_no_place_for_it() {
    for (capacity, by_device, length) in [(2, false, 6), (3, false, 5), (3, true, 5), (5, false, 5)] {
        let sequences = every_sequence(length, &mut |ops| {
            let mut bench = Bench::new(capacity, by_device);
            bench.run(ops)?;
            bench.end();
            Ok(())
        });
        println!("{capacity} pages: {sequences} sequences of {length}");
        assert!(sequences > 5u64.pow(length as u32));
    }
}

#[test]
fn whatever_the_order_of_frees_the_end_is_the_same() {
    for (first, second, third, fourth) in (0..625).map(|code| (code % 5, code / 5 % 5, code / 25 % 5, code / 125)) {
        let mut ends = BTreeSet::new();
        for order in every_order(4) {
            let mut bench = Bench::new(4, false);
            [first, second, third, fourth].into_iter().for_each(|size| bench.allocate(SIZES[size]));
            let starts: Vec<u64> = bench.blocks.iter().map(|block| block.start).collect();
            for start in order.iter().filter_map(|&which| starts.get(which)) {
                let which = bench.blocks.iter().position(|block| block.start == *start).expect("it is live");
                bench.free(which);
            }
            ends.insert(bench.end());
        }
        assert_eq!(ends.len(), 1, "{first} {second} {third} {fourth}: {ends:?}");
    }
}

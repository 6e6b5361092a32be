//! The buddy layer against brute force: operations decoded from bytes, beside a bit for each grain and a state for each page.
//!
//! Every search is made again by looking at every start. What work has reached is read off the simulated device, and where
//! at most one call failed, it must be all or nothing.

use super::{Buddy, Owner, Run, Search, Shape, Window, fill, grains_of};
use crate::arena::{GRAIN_BYTES, Pages, Part, Site, Work};
use crate::driver::sim::{FaultTarget, SimConfig, SimDriver};
use crate::driver::{Call, Driver, HandleProperties, MemoryKind};
use crate::error::CuResult;
use crate::sync::Arc;
use crate::units::{DeviceId, DevicePtr};
use bitvec::prelude::{BitVec, Lsb0};
use std::cmp::Reverse;

const DEVICE: DeviceId = DeviceId(0);
/// How many pieces of work are under way at the most.
const MAX_OPEN: usize = 4;
/// How many operations a sequence has at the most.
const MAX_OPS: usize = 512;

/// What is known of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// In no region.
    Outside,
    Hole,
    /// Of work under way.
    Busy,
    /// Of a piece that the driver would not take back.
    Stuck,
    Mapped(Pages),
}

/// Work under way.
struct Open {
    work: Work,
    /// The window, unless memory is given back.
    window: Option<(Run, Vec<Run>)>,
    /// The pages concerned, as they were, and as they are to be.
    pages: Vec<(u32, State, State)>,
}

struct Model {
    sim: Arc<SimDriver>,
    buddy: Buddy,
    page_grains: u32,
    pages: Vec<State>,
    /// The address of each page; null outside.
    addresses: Vec<DevicePtr>,
    free: BitVec<u64, Lsb0>,
    taken: BitVec<u64, Lsb0>,
    blocks: Vec<Run>,
    open: Vec<Open>,
}

/// Runs the operations that bytes stand for: the body of the fuzz target `buddy`.
///
/// # Panics
/// When something is violated.
pub(crate) fn fuzz_buddy(data: &[u8]) {
    let mut bytes = data.iter().copied();
    let mut field = || bytes.next().unwrap_or(0);
    let (small, first, second, memory) = (field() % 2 == 0, field(), field(), field());
    let mut model = Model::new(small, u32::from(first), u32::from(second), u64::from(memory));
    for _ in 0..MAX_OPS {
        let Some(code) = bytes.next() else { break };
        model.step(code, &mut || bytes.next().unwrap_or(0));
        model.check();
    }
    model.finish();
}

impl Model {
    fn new(small: bool, first: u32, second: u32, memory: u64) -> Self {
        // Leaves of 128 grains have many pages, or few.
        let (page_grains, most) = if small { (4, 48) } else { (32, 10) };
        let page_bytes = u64::from(page_grains) * GRAIN_BYTES;
        let sim = SimDriver::new(SimConfig::default().capacity((memory % 40 + 1) * page_bytes).granularity(page_bytes));
        let site = Site {
            driver: Arc::clone(&sim) as Arc<dyn Driver>,
            device: DEVICE,
            kind: MemoryKind::Device,
            page_bytes,
            maps_pages: true,
            handle_properties: HandleProperties::on(DEVICE),
        };
        let buddy = Buddy::new(Arc::new(site));
        let mut model = Self {
            sim,
            buddy,
            page_grains,
            pages: Vec::new(),
            addresses: Vec::new(),
            free: BitVec::new(),
            taken: BitVec::new(),
            blocks: Vec::new(),
            open: Vec::new(),
        };
        model.add_region(first % most + 1);
        if !second.is_multiple_of(4) {
            model.add_region(second % most + 1);
        }
        model
    }

    fn page_bytes(&self) -> u64 {
        u64::from(self.page_grains) * GRAIN_BYTES
    }

    fn add_region(&mut self, count: u32) {
        let bytes = u64::from(count) * self.page_bytes();
        let base = self.sim.mem_address_reserve(bytes, self.page_bytes()).expect("there are addresses enough");
        self.buddy.arena.add_region(base, bytes).expect("the index space has room");
        for page in 0..count {
            self.pages.push(State::Hole);
            self.addresses.push(base.offset(u64::from(page) * self.page_bytes()));
        }
        // The barrier.
        self.pages.push(State::Outside);
        self.addresses.push(DevicePtr::NULL);
        self.free.resize(self.pages.len() * self.page_grains as usize, false);
        self.taken.resize(self.free.len(), false);
    }

    fn step(&mut self, code: u8, field: &mut dyn FnMut() -> u8) {
        match code % 8 {
            0 | 1 => {
                let shape = self.shape(field(), field());
                self.take(shape, code >= 128);
            }
            2 => {
                if !self.blocks.is_empty() {
                    let which = usize::from(field()) % self.blocks.len();
                    let run = self.blocks.swap_remove(which);
                    self.give(run);
                }
            }
            3 | 4 => {
                let shape = self.shape(field(), field());
                let search = [Search::Quick, Search::Thrifty, Search::Exhaustive][usize::from(field()) % 3];
                let (pick, amounts) = (usize::from(field()), u32::from(field()));
                let before = self.open.len();
                self.map(shape, search, pick, amounts % 16, 1 << (amounts / 16 % 4));
                if code < 128 && self.open.len() > before {
                    self.finish_work(before, true);
                }
            }
            5 => {
                let before = self.open.len();
                self.release(field());
                if code < 128 && self.open.len() > before {
                    self.finish_work(before, true);
                }
            }
            6 => {
                if !self.open.is_empty() {
                    let which = usize::from(field()) % self.open.len();
                    self.finish_work(which, code < 192);
                }
            }
            _ => {
                let calls = [Call::MemCreate, Call::MemMap, Call::MemSetAccess, Call::MemUnmap, Call::MemRelease, Call::ContextSynchronize];
                let (call, after) = (usize::from(field()), u64::from(field() % 16));
                let target = calls.get(call % 8).map_or(FaultTarget::MemoryCalls, |&call| call.into());
                self.sim.fail(target, after, if code < 128 { CuResult::ERROR_OUT_OF_MEMORY } else { CuResult::ERROR_UNKNOWN });
            }
        }
    }

    fn shape(&self, length: u8, flags: u8) -> Shape {
        let grains = match length {
            0..=199 => u32::from(length) % (3 * self.page_grains) + 1,
            _ => (u32::from(length) - 199) * self.page_grains / 2,
        };
        let alignment = if flags.is_multiple_of(4) { GRAIN_BYTES << (flags / 4 % 8) } else { GRAIN_BYTES };
        Shape { grains, alignment, one_handle: flags >= 192, at: None }
    }

    // ---- brute force ----

    fn grains(&self) -> u32 {
        self.free.len() as u32
    }

    fn is_aligned(&self, grain: u32, alignment: u64) -> bool {
        let page = self.addresses[(grain / self.page_grains) as usize];
        !page.is_null() && page.offset(u64::from(grain % self.page_grains) * GRAIN_BYTES).is_aligned_to(alignment)
    }

    fn all_free(&self, run: Run) -> bool {
        run.end() <= self.grains() && self.free[run.start as usize..run.end() as usize].all()
    }

    fn pages_of(&self, run: Run) -> impl Iterator<Item = u32> {
        run.start / self.page_grains..(run.end() - 1) / self.page_grains + 1
    }

    fn page_run(&self, page: u32) -> Run {
        grains_of(Pages { first: page, count: 1 }, self.page_grains)
    }

    fn whole_free_pages(&self, run: Run) -> u32 {
        self.pages_of(run).filter(|&page| self.all_free(self.page_run(page))).count() as u32
    }

    /// Whether a free run of this shape begins at a grain.
    fn fits(&self, start: u32, shape: Shape) -> bool {
        let run = Run { start, len: shape.grains };
        let one_piece = || {
            let first = self.pages[(start / self.page_grains) as usize];
            self.pages_of(run).all(|page| self.pages[page as usize] == first)
        };
        self.all_free(run) && self.is_aligned(start, shape.alignment) && (!shape.one_handle || one_piece())
    }

    /// The whole free run around a free grain.
    fn run_around(&self, grain: u32) -> Run {
        let start = self.free[..grain as usize].last_zero().map_or(0, |zero| zero as u32 + 1);
        let end = self.free[grain as usize..].first_zero().map_or(self.grains(), |zero| grain + zero as u32);
        Run { start, len: end - start }
    }

    /// What a window needs: unmapped pages, whole free pages, and grains on unmapped pages.
    fn measure(&self, start: u32, shape: Shape) -> Option<(u32, u32, u32)> {
        let run = Run { start, len: shape.grains };
        if run.end() > self.grains() || !self.is_aligned(start, shape.alignment) {
            return None;
        }
        let (mut missing, mut new) = (0, 0);
        for page in self.pages_of(run) {
            let whole = self.page_run(page);
            let part = Run { start: whole.start.max(start), len: whole.end().min(run.end()) - whole.start.max(start) };
            if self.pages[page as usize] == State::Hole {
                missing += 1;
                new += part.len;
            } else if !self.all_free(part) {
                return None;
            }
        }
        Some((missing, self.whole_free_pages(run), new))
    }

    /// How good a window is: the less, the better.
    fn rank((missing, whole, new): (u32, u32, u32), search: Search) -> (u32, u32, u32) {
        (if search == Search::Quick { 0 } else { missing + whole }, missing, new)
    }

    fn check_windows(&self, shape: Shape, search: Search) -> Vec<Window> {
        let windows = self.buddy.windows(shape, search);
        if shape.one_handle {
            let count = shape.grains.div_ceil(self.page_grains);
            let fits = |first: u32| {
                first + count <= self.pages.len() as u32
                    && (first..first + count).all(|page| self.pages[page as usize] == State::Hole)
                    && self.is_aligned(first * self.page_grains, shape.alignment)
            };
            let lowest = (0..self.pages.len() as u32).find(|&first| fits(first));
            assert_eq!(windows.first().map(|window| window.run.start / self.page_grains), lowest, "one handle for {shape:?}");
            assert!(windows.iter().all(|w| w.one_handle && w.missing_pages == count && w.run.start.is_multiple_of(self.page_grains)));
            return windows;
        }
        let mut last = None;
        for window in &windows {
            assert_eq!(window.run.len, shape.grains);
            let needs = self.measure(window.run.start, shape).unwrap_or_else(|| panic!("{window:?} is no window for {shape:?}"));
            let missing: Vec<u32> = window.missing.iter().flat_map(|pages| pages.first..pages.end()).collect();
            let holes: Vec<u32> = self.pages_of(window.run).filter(|&page| self.pages[page as usize] == State::Hole).collect();
            assert_eq!((&missing, window.missing_pages), (&holes, needs.0), "{window:?}");
            let rank = (Self::rank(needs, search), window.run.start);
            assert!(last.is_none_or(|last| last < rank), "{windows:?} are not sorted, best first");
            last = Some(rank);
        }
        let best = (0..self.grains()).filter_map(|start| self.measure(start, shape)).map(|needs| Self::rank(needs, search)).min();
        let found = windows.first().and_then(|window| self.measure(window.run.start, shape)).map(|needs| Self::rank(needs, search));
        assert_eq!(found, best, "the best window for {shape:?}, {search:?}: {:?}", windows.first());
        windows
    }

    /// The handles of which every grain is free, apart from a window, in their order.
    fn check_idle(&self, spare: Option<&Window>) -> Vec<super::Idle> {
        let idle = self.buddy.idle_handles(spare);
        let spare = spare.map_or(Run::default(), |window| window.run);
        let mut expected = Vec::new();
        for (page, &state) in self.pages.iter().enumerate() {
            if let State::Mapped(pages) = state
                && pages.first == page as u32
            {
                let run = grains_of(pages, self.page_grains);
                if self.all_free(run) && (run.start..run.end()).all(|grain| !spare.contains(grain)) {
                    expected.push(pages);
                }
            }
        }
        expected.sort_by_key(|pages| Reverse((pages.count, pages.first)));
        assert_eq!(idle.iter().map(|idle| idle.pages).collect::<Vec<_>>(), expected, "idle handles apart from {spare:?}");
        for idle in &idle {
            assert_eq!(idle.bytes, u64::from(idle.pages.count) * self.page_bytes());
            assert_eq!(self.buddy.arena.handle(idle.handle).map(|handle| handle.pages), Some(idle.pages));
        }
        idle
    }

    // ---- operations ----

    fn take(&mut self, shape: Shape, scarce: bool) {
        let fits = (0..self.grains()).filter(|&start| self.fits(start, shape));
        // What taking each would break: whole free pages, and in which free run.
        let cost = |start| (self.whole_free_pages(Run { start, len: shape.grains }), self.run_around(start));
        let fits: Vec<_> = fits.map(|start| (start, cost(start))).collect();
        let key = |&(_, (broken, around)): &(u32, (u32, Run))| (broken, around.len, around.start);
        let found = self.buddy.take(shape, scarce);
        let expected = if scarce && !shape.one_handle {
            let best = fits.iter().map(key).min();
            fits.iter().find(|fit| found.is_none_or(|run| run.start == fit.0) && Some(key(fit)) == best).map(|fit| fit.0)
        } else {
            fits.first().map(|fit| fit.0)
        };
        assert_eq!(found, expected.map(|start| Run { start, len: shape.grains }), "{shape:?}, scarce: {scarce}; what fits: {fits:?}");
        if let Some(run) = found {
            self.note_taken(run);
        }
    }

    fn note_taken(&mut self, run: Run) {
        self.free[run.start as usize..run.end() as usize].fill(false);
        self.taken[run.start as usize..run.end() as usize].fill(true);
        // Slabs are found by each of their grains, blocks by the first.
        if run.len <= 4 {
            (run.start..run.end()).for_each(|grain| self.buddy.directory.set(grain, Owner::Slab(run.start)));
        } else {
            self.buddy.directory.set(run.start, Owner::Block(run.start));
        }
        self.blocks.push(run);
    }

    fn give(&mut self, run: Run) {
        assert!(self.taken[run.start as usize..run.end() as usize].all());
        for grain in run.start..run.end() {
            assert!(self.buddy.is_taken(grain), "grain {grain}");
            let expected = match grain {
                _ if run.len <= 4 => Owner::Slab(run.start),
                _ if grain == run.start => Owner::Block(run.start),
                _ => Owner::Nothing,
            };
            assert_eq!(self.buddy.directory.get(grain), expected);
            self.buddy.directory.set(grain, Owner::Nothing);
        }
        self.buddy.give(run);
        self.taken[run.start as usize..run.end() as usize].fill(false);
        self.free[run.start as usize..run.end() as usize].fill(true);
    }

    /// Begins to map a window, with idle handles until at most `new_pages` pages are left.
    fn map(&mut self, shape: Shape, search: Search, pick: usize, new_pages: u32, handle_pages: u32) {
        let windows = self.check_windows(shape, search);
        if windows.is_empty() || self.open.len() == MAX_OPEN {
            return;
        }
        let window = &windows[pick % windows.len()];
        let idle = self.check_idle(Some(window));
        let parts = if window.one_handle {
            window.missing.iter().copied().map(Part::New).collect()
        } else {
            let filling = fill(&window.missing, &idle, new_pages, handle_pages);
            self.check_filling(window, &idle, &filling, new_pages, handle_pages);
            filling.parts
        };
        let mut pages = Vec::new();
        for part in &parts {
            match *part {
                Part::New(new) => pages.extend((new.first..new.end()).map(|page| (page, State::Hole, State::Mapped(new)))),
                Part::Moved { handle, first } => {
                    let from = idle.iter().find(|idle| idle.handle == handle).expect("an idle handle is moved").pages;
                    let to = Pages { first, count: from.count };
                    pages.extend((from.first..from.end()).map(|page| (page, State::Mapped(from), State::Hole)));
                    pages.extend((to.first..to.end()).map(|page| (page, State::Hole, State::Mapped(to))));
                    self.free[grains_of(from, self.page_grains).start as usize..grains_of(from, self.page_grains).end() as usize]
                        .fill(false);
                }
            }
        }
        let (work, free_parts) = self.buddy.begin_map(window, &parts);
        let inside: Vec<u32> = (window.run.start..window.run.end()).filter(|&grain| self.free[grain as usize]).collect();
        assert_eq!(free_parts.iter().flat_map(|part| part.start..part.end()).collect::<Vec<_>>(), inside, "the free parts of {window:?}");
        inside.iter().for_each(|&grain| self.free.set(grain as usize, false));
        pages.iter().for_each(|&(page, ..)| self.pages[page as usize] = State::Busy);
        self.open.push(Open { work, window: Some((window.run, free_parts)), pages });
    }

    fn check_filling(&self, window: &Window, idle: &[super::Idle], filling: &super::Filling, most_new: u32, handle_pages: u32) {
        let (mut filled, mut moved, mut new_pages) = (Vec::new(), Vec::new(), 0);
        for part in &filling.parts {
            match *part {
                Part::New(new) => {
                    assert!(new.count.is_power_of_two() && new.count <= handle_pages, "{filling:?}");
                    new_pages += new.count;
                    filled.extend(new.first..new.end());
                }
                Part::Moved { handle, first } => {
                    let count = idle.iter().find(|idle| idle.handle == handle).expect("an idle handle is moved").pages.count;
                    moved.push(handle);
                    filled.extend(first..first + count);
                }
            }
        }
        filled.sort_unstable();
        assert_eq!(filled, window.missing.iter().flat_map(|pages| pages.first..pages.end()).collect::<Vec<_>>(), "{filling:?}");
        assert_eq!(new_pages, filling.new_pages);
        assert!(moved.iter().all(|handle| moved.iter().filter(|other| *other == handle).count() == 1));
        if new_pages > most_new {
            assert_eq!(moved.len() + filling.too_large.len(), idle.len(), "{filling:?} leaves a handle out");
        }
    }

    /// Begins to give idle handles back: those whose bit is set, of eight.
    fn release(&mut self, bits: u8) {
        let idle = self.check_idle(None);
        if self.open.len() == MAX_OPEN {
            return;
        }
        let chosen: Vec<_> = idle.iter().enumerate().filter(|(at, _)| bits >> (at % 8) & 1 == 1).map(|(_, idle)| *idle).collect();
        let stuck = self.pages.iter().enumerate().filter(|(_, state)| **state == State::Stuck);
        let mut pages: Vec<_> = stuck.map(|(page, _)| (page as u32, State::Stuck, State::Hole)).collect();
        for idle in &chosen {
            let run = grains_of(idle.pages, self.page_grains);
            self.free[run.start as usize..run.end() as usize].fill(false);
            pages.extend((idle.pages.first..idle.pages.end()).map(|page| (page, State::Mapped(idle.pages), State::Hole)));
        }
        let work = self.buddy.begin_release(&chosen.iter().map(|idle| idle.handle).collect::<Vec<_>>());
        pages.iter().for_each(|&(page, ..)| self.pages[page as usize] = State::Busy);
        self.open.push(Open { work, window: None, pages });
    }

    /// Does work and books it; where `begins` is not set, it is given up before the first call.
    fn finish_work(&mut self, which: usize, begins: bool) {
        let Open { mut work, window, pages } = self.open.swap_remove(which);
        let planned = self.sim.faults_planned();
        let maps = window.is_some();
        assert_eq!(work.gives_back(), !maps || work.pieces() == 0);
        let done = match (maps, begins) {
            (true, true) => work.grow().is_ok(),
            (true, false) => work.release().is_err(),
            (false, _) => work.release().is_ok(),
        };
        let struck = planned - self.sim.faults_planned();
        assert!(struck == 0 || !done, "a failed call went unnoticed");
        let keep = window.as_ref().filter(|_| done).map_or(Run::default(), |(run, _)| *run);
        self.buddy.settle(work, keep);
        for &(page, before, target) in &pages {
            let state = self.state_on_device(page);
            if done {
                assert_eq!(state, target, "page {page} after work that succeeded");
            } else if maps && struck <= 1 {
                assert_eq!(state, before, "page {page} after a growth that failed");
            }
            self.pages[page as usize] = state;
            let run = self.page_run(page);
            self.free[run.start as usize..run.end() as usize].fill(matches!(state, State::Mapped(_)));
        }
        if let Some((run, parts)) = window {
            if done {
                assert!(self.sim.is_writable(DEVICE, self.buddy.arena.address_of(run.start), u64::from(run.len) * GRAIN_BYTES));
                self.note_taken(run);
            } else {
                self.buddy.put_back(&parts);
                parts.iter().for_each(|part| self.free[part.start as usize..part.end() as usize].fill(true));
            }
        }
    }

    /// What the device says of a page that no work is under way on.
    fn state_on_device(&self, page: u32) -> State {
        let address = self.addresses[page as usize];
        let Some(piece) = self.sim.piece_at(address) else { return State::Hole };
        if !self.sim.is_writable(DEVICE, address, self.page_bytes()) {
            return State::Stuck;
        }
        let first = self.addresses.iter().position(|&at| at == piece.address).expect("a piece begins at a page") as u32;
        State::Mapped(Pages { first, count: (piece.bytes / self.page_bytes()) as u32 })
    }

    // ---- after each operation ----

    fn check(&self) {
        let mut free: BitVec<u64, Lsb0> = BitVec::repeat(false, self.free.len());
        let mut longest = 0;
        self.buddy.tree.visit(1, |run| {
            free[run.start as usize..run.end() as usize].fill(true);
            longest = longest.max(run.len);
            assert_eq!(self.run_around(run.start), run);
            true
        });
        assert!(free == self.free, "free grains: {:?} where {:?} are", ones(&free), ones(&self.free));
        assert_eq!(self.buddy.free_bytes(), self.free.count_ones() as u64 * GRAIN_BYTES);
        assert_eq!(self.buddy.largest_free_bytes(), u64::from(longest) * GRAIN_BYTES);
        assert_eq!(self.buddy.taken_grains(), self.taken.count_ones() as u64);
        let holes = self.pages.split(|state| *state != State::Hole).map(<[State]>::len);
        let widest = holes.max().unwrap_or(0) as u64;
        assert!((widest == 0 || self.buddy.has_hole(widest)) && !self.buddy.has_hole(widest + 1));
        self.buddy.tree.check().expect("the tree's invariants hold");
        self.buddy.arena.check().expect("the arena's invariants hold");
        self.check_idle(None);
        if self.open.is_empty() {
            self.buddy.check(self.taken.count_ones() as u64).expect("the invariants hold");
            assert_eq!(self.buddy.arena.held_bytes(), self.sim.held_bytes(DEVICE));
        }
    }

    /// Everything goes back.
    fn finish(mut self) {
        self.sim.clear_faults();
        while !self.open.is_empty() {
            self.finish_work(0, true);
            self.check();
        }
        while let Some(run) = self.blocks.pop() {
            self.give(run);
        }
        self.check();
        self.release(u8::MAX);
        self.finish_work(0, true);
        self.check();
        assert_eq!((self.sim.held_bytes(DEVICE), self.buddy.arena.unsettled_bytes()), (0, 0));
        assert!(self.buddy.take(Shape { grains: 1, alignment: GRAIN_BYTES, one_handle: false, at: None }, false).is_none());
        self.buddy.arena.close();
        self.sim.audit().expect("nothing is outstanding");
    }
}

fn ones(bits: &BitVec<u64, Lsb0>) -> Vec<usize> {
    bits.iter_ones().collect()
}

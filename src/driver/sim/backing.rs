//! Real memory behind the addresses of a backed machine.
//!
//! Each device's memory is one memory file, and a handle is a range of it; mapping a handle maps that range at the
//! address, so bytes move with the handle, and two mappings of one handle show the same bytes. Plain allocations lie in
//! one anonymous region. Addresses are real ones of this process, and the protection of the pages follows the access
//! that was set: a stray access from the host is a segmentation fault.
//!
//! Fresh memory reads as zeros, as it was seen to on an H200.
//!
//! This is the one file of the simulated device with unsafe code. Its functions are safe to call because each looks up
//! the range it is given in the table of what is accessible here, which [`Backing`] alone writes, and does nothing
//! where the range is not in it.

use super::space::Space;
use crate::driver::kernels::pattern;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr;

/// The most handles mapped at a time: two kernel mappings each, and Linux allows 65,530.
const MAX_MAPPED: usize = 16_000;
/// The most addresses reserved, as a multiple of the memory of all devices.
const MAX_RESERVED: u64 = 8;
/// The pages of the host, or a multiple of them.
const HOST_PAGE: u64 = 64 << 10;
/// The length of a memory file, which is sparse. A handle's range need not fit a gap between others.
const FILE_BYTES: u64 = 1 << 44;

#[derive(Debug)]
pub(super) struct Backing {
    files: Vec<MemoryFile>,
    /// The region of plain allocations.
    plain: (u64, u64),
    reservations: BTreeMap<u64, u64>,
    reserved_bytes: u64,
    reserve_limit: u64,
    mapped: usize,
    /// What can be touched, start to end and protection; ranges do not overlap.
    accessible: BTreeMap<u64, Range>,
}

#[derive(Debug)]
struct MemoryFile {
    file: OwnedFd,
    free: Space,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    end: u64,
    writable: bool,
}

fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Fresh addresses with nothing behind them.
fn reserve(bytes: u64) -> Option<u64> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory in use (mmap(2)).
    let start = unsafe { mmap_anonymous(ptr::null_mut(), usize::try_from(bytes).ok()?, ProtFlags::empty(), flags) }.ok()?;
    Some(start.expose_provenance() as u64)
}

/// Gives addresses back.
fn unreserve(start: u64, bytes: u64) {
    if bytes > 0 {
        // SAFETY: callers pass ranges that `reserve` returned, or parts of them, once; nothing refers to the memory.
        // Failure would leak addresses and nothing else.
        _ = unsafe { munmap(pointer(start), bytes as usize) };
    }
}

impl Backing {
    /// Memory files for devices with these capacities, and a region for plain allocations.
    pub(super) fn new(capacities: &[u64]) -> rustix::io::Result<Self> {
        let total = capacities.iter().fold(0, |sum: u64, &bytes| sum.saturating_add(bytes));
        let mut files = Vec::new();
        for _ in capacities {
            let file = memfd_create(c"vrampool-device", MemfdFlags::CLOEXEC)?;
            ftruncate(&file, FILE_BYTES)?;
            files.push(MemoryFile { file, free: Space::new(0, FILE_BYTES) });
        }
        // Twice the memory, so that a device can be full though its addresses are in pieces, and as much again for the
        // host's; less where the system refuses.
        let mut bytes = total.saturating_mul(4).max(1 << 30);
        let plain = loop {
            match reserve(bytes) {
                Some(start) => break (start, bytes),
                None if bytes > HOST_PAGE => bytes = (bytes / 2).next_multiple_of(HOST_PAGE),
                None => return Err(rustix::io::Errno::NOMEM),
            }
        };
        let reserve_limit = total.saturating_mul(MAX_RESERVED);
        let accessible = BTreeMap::new();
        Ok(Self { files, plain, reservations: BTreeMap::new(), reserved_bytes: 0, reserve_limit, mapped: 0, accessible })
    }

    /// The region of plain allocations: start and bytes.
    pub(super) fn plain_region(&self) -> (u64, u64) {
        self.plain
    }

    /// Makes a plain allocation accessible.
    pub(super) fn plain_alloc(&mut self, start: u64, bytes: u64) -> bool {
        let region_end = self.plain.0 + self.plain.1;
        if start < self.plain.0 || start.checked_add(bytes).is_none_or(|end| end > region_end) {
            return false;
        }
        let first = (start / HOST_PAGE * HOST_PAGE).max(self.plain.0);
        let end = (start + bytes).next_multiple_of(HOST_PAGE).min(region_end);
        // SAFETY: the range lies in the plain region, which is this struct's own; making its pages accessible takes
        // nothing from anyone (mprotect(2)).
        if unsafe { mprotect(pointer(first), (end - first) as usize, MprotectFlags::READ | MprotectFlags::WRITE) }.is_err() {
            return false;
        }
        self.accessible.insert(start, Range { end: start + bytes, writable: true });
        true
    }

    /// Takes a plain allocation away. Its pages go back, but for those it may share with a neighbour.
    pub(super) fn plain_free(&mut self, start: u64) {
        let Some(range) = self.accessible.remove(&start) else { return };
        let first = start.next_multiple_of(HOST_PAGE);
        let end = range.end / HOST_PAGE * HOST_PAGE;
        if first < end {
            // SAFETY: whole pages inside an allocation that is no longer accessible; they read as zeros afterwards
            // (madvise(2), private anonymous memory). Failure only keeps the memory longer.
            _ = unsafe { madvise(pointer(first), (end - first) as usize, Advice::LinuxDontNeed) };
        }
    }

    /// Reserves addresses; `None` where the limit is reached or the system refuses.
    pub(super) fn reserve(&mut self, bytes: u64, alignment: u64) -> Option<u64> {
        if self.reserved_bytes.checked_add(bytes)? > self.reserve_limit {
            return None;
        }
        // The kernel aligns to its pages only: more is reserved, and both ends given back.
        let extra = if alignment > HOST_PAGE { alignment } else { HOST_PAGE };
        let whole = reserve(bytes.checked_add(extra)?)?;
        let start = whole.next_multiple_of(extra);
        unreserve(whole, start - whole);
        unreserve(start + bytes, extra - (start - whole));
        self.reservations.insert(start, bytes);
        self.reserved_bytes += bytes;
        Some(start)
    }

    /// Gives a reservation back in which nothing is mapped.
    pub(super) fn unreserve(&mut self, start: u64) {
        if let Some(bytes) = self.reservations.remove(&start) {
            self.reserved_bytes -= bytes;
            unreserve(start, bytes);
        }
    }

    /// A range of a device's memory file, by its offset.
    pub(super) fn create(&mut self, device: usize, bytes: u64) -> Option<u64> {
        self.files[device].free.take(bytes, HOST_PAGE, 0)
    }

    /// Gives the range back; its bytes are gone.
    pub(super) fn destroy(&mut self, device: usize, offset: u64, bytes: u64) {
        let MemoryFile { file, free } = &mut self.files[device];
        if fallocate(&*file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, bytes).is_ok() {
            free.give(offset, bytes);
        }
    }

    fn is_reserved(&self, start: u64, bytes: u64) -> bool {
        let before = self.reservations.range(..=start).next_back();
        before.is_some_and(|(&from, &length)| start + bytes <= from + length)
    }

    /// Maps a range of a device's memory file, without access.
    pub(super) fn map(&mut self, start: u64, bytes: u64, device: usize, offset: u64) -> bool {
        if self.mapped >= MAX_MAPPED || !self.is_reserved(start, bytes) {
            return false;
        }
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the addresses are reserved by this struct, so the fixed mapping replaces none but its own (mmap(2)).
        // No reference into them exists: all access is through raw pointers, under `&mut self`.
        let done = unsafe { mmap(pointer(start), bytes as usize, ProtFlags::empty(), flags, &self.files[device].file, offset) }.is_ok();
        self.mapped += usize::from(done);
        done
    }

    /// Puts bare addresses back in the place of a mapping.
    pub(super) fn unmap(&mut self, start: u64, bytes: u64) -> bool {
        if !self.is_reserved(start, bytes) {
            return false;
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: as in `map`.
        let done = unsafe { mmap_anonymous(pointer(start), bytes as usize, ProtFlags::empty(), flags) }.is_ok();
        if done {
            self.mapped -= 1;
            self.accessible.remove(&start);
        }
        done
    }

    /// Sets what may be done with a mapping.
    pub(super) fn protect(&mut self, start: u64, bytes: u64, readable: bool, writable: bool) -> bool {
        if !self.is_reserved(start, bytes) {
            return false;
        }
        let flags = match (readable, writable) {
            (_, true) => MprotectFlags::READ | MprotectFlags::WRITE,
            (true, false) => MprotectFlags::READ,
            (false, false) => MprotectFlags::empty(),
        };
        // SAFETY: the addresses are reserved by this struct; changing their protection affects nobody else
        // (mprotect(2)).
        let done = unsafe { mprotect(pointer(start), bytes as usize, flags) }.is_ok();
        if done && (readable || writable) {
            self.accessible.insert(start, Range { end: start + bytes, writable });
        } else if done {
            self.accessible.remove(&start);
        }
        done
    }

    /// A pointer to a range of which every byte may be read, and written where `writes`.
    fn bytes(&self, start: u64, bytes: u64, writes: bool) -> Option<*mut u8> {
        let end = start.checked_add(bytes)?;
        let mut at = start;
        while at < end {
            let (_, range) = self.accessible.range(..=at).next_back()?;
            if range.end <= at || (writes && !range.writable) {
                return None;
            }
            at = range.end;
        }
        Some(pointer(start).cast())
    }

    /// Copies bytes in from the host.
    pub(super) fn write(&mut self, to: u64, from: &[u8]) {
        if let Some(to) = self.bytes(to, from.len() as u64, true) {
            // SAFETY: `bytes` found all of the range mapped and writable, and it is no memory of Rust's, so it cannot
            // overlap `from`.
            unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        }
    }

    /// Copies bytes out to the host.
    pub(super) fn read(&mut self, to: &mut [u8], from: u64) {
        if let Some(from) = self.bytes(from, to.len() as u64, false) {
            // SAFETY: as in `write`, the other way round.
            unsafe { ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        }
    }

    /// Copies bytes between two ranges, which may overlap.
    pub(super) fn copy(&mut self, to: u64, from: u64, bytes: u64) {
        if let (Some(to), Some(from)) = (self.bytes(to, bytes, true), self.bytes(from, bytes, false)) {
            // SAFETY: `bytes` found both ranges mapped, one writable and one readable.
            unsafe { ptr::copy(from, to, bytes as usize) };
        }
    }

    /// Sets every byte of a range.
    pub(super) fn fill(&mut self, to: u64, value: u8, bytes: u64) {
        if let Some(to) = self.bytes(to, bytes, true) {
            // SAFETY: `bytes` found all of the range mapped and writable.
            unsafe { ptr::write_bytes(to, value, bytes as usize) };
        }
    }

    /// Writes the pattern of a seed.
    pub(super) fn fill_pattern(&mut self, to: u64, words: u64, seed: u32) {
        let Some(bytes) = words.checked_mul(4) else { return };
        let Some(to) = self.bytes(to, bytes, true) else { return };
        for index in 0..words {
            // SAFETY: `bytes` found 4 × `words` bytes mapped and writable, and word `index` lies in them.
            unsafe { to.add(index as usize * 4).cast::<u32>().write_unaligned(pattern(seed, index)) };
        }
    }

    /// Counts the words that differ from the pattern of a seed.
    pub(super) fn check_pattern(&mut self, from: u64, words: u64, seed: u32) -> u64 {
        let Some(from) = words.checked_mul(4).and_then(|bytes| self.bytes(from, bytes, false)) else { return words };
        // SAFETY: `bytes` found 4 × `words` bytes mapped and readable, and word `index` lies in them.
        let word = |index: u64| unsafe { from.add(index as usize * 4).cast::<u32>().read_unaligned() };
        (0..words).filter(|&index| word(index) != pattern(seed, index)).count() as u64
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        for (&start, &bytes) in &self.reservations {
            unreserve(start, bytes);
        }
        unreserve(self.plain.0, self.plain.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_accessible_at_the_moment_is_touched() {
        let bytes = HOST_PAGE;
        let mut backing = Backing::new(&[16 * bytes]).unwrap();
        let at = backing.reserve(4 * bytes, 0).unwrap();
        let offset = backing.create(0, bytes).unwrap();
        let read = |backing: &mut Backing| {
            let mut byte = [9];
            backing.read(&mut byte, at);
            byte[0]
        };
        assert!(!backing.map(at.wrapping_sub(bytes), bytes, 0, offset), "outside the reservation");
        assert!(backing.map(at, bytes, 0, offset));
        assert_eq!(read(&mut backing), 9, "mapped without access");
        assert!(backing.protect(at, bytes, true, false));
        backing.write(at, &[7]);
        assert_eq!(read(&mut backing), 0, "read only");
        assert!(backing.protect(at, bytes, true, true));
        backing.write(at, &[7]);
        backing.fill(at, 8, bytes + 1);
        backing.copy(at, at + bytes, 1);
        assert_eq!(read(&mut backing), 7, "a range that leaves the mapping is not touched at all");
        assert!(backing.unmap(at, bytes));
        assert_eq!(read(&mut backing), 9, "unmapped");
        assert!(backing.map(at + bytes, bytes, 0, offset) && backing.protect(at + bytes, bytes, true, true));
        let mut byte = [0];
        backing.read(&mut byte, at + bytes);
        assert_eq!(byte, [7], "the bytes moved");
    }
}

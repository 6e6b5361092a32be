//! The check before the clock: what lives where, over all threads.

use crate::Failure;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use vrampool::units::{Bytes, MIN_ALIGNMENT};

/// Every live block of one subject. A block is entered after it was allocated and leaves before it is freed, so two that
/// overlap here were live together.
#[derive(Default)]
pub(crate) struct Books(Mutex<BTreeMap<u64, u64>>);

impl Books {
    fn live(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a block.
    pub(crate) fn enter(&self, address: u64, size: u64) -> Result<(), Failure> {
        let wrong = |what: String| Err(Failure::Work(format!("wrong before it was timed: {} at {address:#x} {what}", Bytes(size))));
        if address == 0 || !address.is_multiple_of(MIN_ALIGNMENT) {
            return wrong(format!("is not at a multiple of {MIN_ALIGNMENT} bytes"));
        }
        let Some(end) = address.checked_add(size) else {
            return wrong("reaches past the last address".to_owned());
        };
        let mut live = self.live();
        // Live blocks do not overlap, so the last that begins before the end is the only one to look at.
        if let Some((&other, &bytes)) = live.range(..end).next_back()
            && address < other + bytes
        {
            return wrong(format!("overlaps the live block of {} at {other:#x}", Bytes(bytes)));
        }
        live.insert(address, size);
        Ok(())
    }

    /// Has a block leave.
    pub(crate) fn leave(&self, address: u64) {
        self.live().remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_wrong(books: &Books, address: u64, size: u64, what: &str) -> bool {
        matches!(books.enter(address, size), Err(Failure::Work(message)) if message.contains(what))
    }

    #[test]
    fn blocks_that_overlap_are_found_from_either_side() {
        let books = Books::default();
        assert!(books.enter(1024, 512).is_ok());
        for (address, size) in [(1024, 1), (1024, 512), (1280, 256), (768, 257), (512, 4096)] {
            assert!(is_wrong(&books, address, size, "overlaps"), "{size} at {address}");
        }
        assert!(books.enter(768, 256).is_ok() && books.enter(1536, 1).is_ok(), "neighbours");
        books.leave(1024);
        assert!(books.enter(1280, 256).is_ok(), "what left is not live");
    }

    #[test]
    fn addresses_that_no_allocator_may_give_are_found() {
        let books = Books::default();
        assert!(is_wrong(&books, 0, 1, "multiple"));
        assert!(is_wrong(&books, 1024 + 128, 1, "multiple"));
        assert!(is_wrong(&books, u64::MAX - 255, 256, "past the last address"));
    }
}

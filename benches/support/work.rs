//! A work: allocations and frees in their order.

/// One step of a work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// Allocate this many bytes. Allocations are numbered from 0 in their order.
    Allocate(u64),
    /// Free the allocation of this number.
    Free(usize),
}

/// Allocations and frees by their name.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    /// What it is called in tables.
    pub(crate) name: String,
    /// What is done.
    pub(crate) events: Vec<Event>,
}

impl Work {
    /// The largest sum of bytes requested that is live at a moment.
    pub(crate) fn peak_live_bytes(&self) -> u64 {
        let mut sizes = Vec::new();
        let (mut live, mut peak) = (0u64, 0);
        for event in &self.events {
            match *event {
                Event::Allocate(size) => {
                    sizes.push(size);
                    live += size;
                    peak = peak.max(live);
                }
                Event::Free(number) => live -= sizes[number],
            }
        }
        peak
    }
}

//! The directory: from a grain to what it belongs to.

/// What a grain belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Owner {
    /// Nothing begins here: the grain is free, unmapped, or inside a block.
    Nothing,
    /// A block begins here, by its index.
    Block(u32),
    /// A slab has this grain, by its index. Every grain of a slab says so.
    Slab(u32),
}

const CHUNK_GRAINS: usize = 8192;

/// An entry for each grain, in chunks made as they are used: 4 bytes a grain of 16 KiB.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    /// 0, or twice the index plus 1 for a block and 2 for a slab.
    chunks: Vec<Option<Box<[u32; CHUNK_GRAINS]>>>,
}

impl Directory {
    pub(crate) fn get(&self, grain: u32) -> Owner {
        let (chunk, at) = (grain as usize / CHUNK_GRAINS, grain as usize % CHUNK_GRAINS);
        match self.chunks.get(chunk).and_then(Option::as_ref).map_or(0, |entries| entries[at]) {
            0 => Owner::Nothing,
            entry if entry % 2 == 1 => Owner::Block(entry / 2),
            entry => Owner::Slab(entry / 2 - 1),
        }
    }

    pub(crate) fn set(&mut self, grain: u32, owner: Owner) {
        let (chunk, at) = (grain as usize / CHUNK_GRAINS, grain as usize % CHUNK_GRAINS);
        if self.chunks.len() <= chunk {
            self.chunks.resize_with(chunk + 1, || None);
        }
        let entries = self.chunks[chunk].get_or_insert_with(|| Box::new([0; CHUNK_GRAINS]));
        entries[at] = match owner {
            Owner::Nothing => 0,
            Owner::Block(index) => 2 * index + 1,
            Owner::Slab(index) => 2 * index + 2,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_again_and_all_others_are_empty() {
        let mut directory = Directory::default();
        let entries =
            [(0, Owner::Block(0)), (1, Owner::Slab(0)), (8191, Owner::Block(7)), (8192, Owner::Slab(7)), (1 << 27, Owner::Slab(1 << 30))];
        for (grain, owner) in entries {
            directory.set(grain, owner);
        }
        for (grain, owner) in entries {
            assert_eq!(directory.get(grain), owner);
            assert_eq!(directory.get(grain + 2), Owner::Nothing);
            directory.set(grain, Owner::Nothing);
            assert_eq!(directory.get(grain), Owner::Nothing);
        }
        assert_eq!(directory.get(u32::MAX), Owner::Nothing);
    }
}

//! A table of records by dense index.

/// Records of one kind, each under an index that stays its own until it is removed. Indices are used again.
#[derive(Clone, Debug)]
pub(crate) struct Table<T> {
    records: Vec<Option<T>>,
    vacant: Vec<u32>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { records: Vec::new(), vacant: Vec::new() }
    }
}

impl<T> Table<T> {
    pub(crate) fn insert(&mut self, record: T) -> u32 {
        if let Some(index) = self.vacant.pop() {
            self.records[index as usize] = Some(record);
            return index;
        }
        self.records.push(Some(record));
        (self.records.len() - 1) as u32
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<T> {
        let record = self.records.get_mut(index as usize)?.take()?;
        self.vacant.push(index);
        Some(record)
    }

    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        self.records.get(index as usize)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.records.get_mut(index as usize)?.as_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.records.iter().enumerate().filter_map(|(index, record)| Some((index as u32, record.as_ref()?)))
    }

    pub(crate) fn len(&self) -> usize {
        self.records.len() - self.vacant.len()
    }
}

#[cfg(test)]
mod tests {
    use super::Table;

    #[test]
    fn indices_are_used_again_and_dead_ones_find_nothing() {
        let mut table = Table::default();
        let (a, b) = (table.insert('a'), table.insert('b'));
        assert_eq!(table.remove(a), Some('a'));
        assert_eq!((table.remove(a), table.get(a), table.get(2)), (None, None, None));
        assert_eq!(table.get_mut(99), None);
        assert_eq!(table.insert('c'), a);
        assert_eq!(table.iter().map(|(i, &r)| (i, r)).collect::<Vec<_>>(), [(a, 'c'), (b, 'b')]);
        assert_eq!(table.len(), 2);
    }
}

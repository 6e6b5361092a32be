//! Sequences as bytes: six for the setup, then for each operation a code and its fields, little-endian. Any bytes are a
//! sequence; what is cut off at the end is left out.

use super::{Op, Setup, Size};

/// How many operations a sequence has at the most.
const MAX_OPS: usize = 4096;

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    fn short(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes([self.byte()?, self.byte()?]))
    }

    fn size(&mut self) -> Option<Size> {
        Some(Size { exponent: self.byte()?, fraction: self.short()? })
    }

    fn op(&mut self) -> Option<Op> {
        let code = self.byte()?;
        Some(match code {
            73 => Op::Reserve { size: self.size()? },
            74 | 75 | 204 | 205 => Op::Draw {
                which: self.byte()?,
                size: self.size()?,
                alignment: if code % 10 == 5 { self.byte()? } else { 0 },
                buffer: code >= 128,
            },
            76 => Op::EndReservation { which: self.byte()? },
            77 => Op::Grow { which: self.short()?, size: self.size()? },
            _ => self.older_op(code)?,
        })
    }

    /// The operations that have had all codes, before there were others.
    fn older_op(&mut self, code: u8) -> Option<Op> {
        Some(match code % 10 {
            0..=2 => Op::Allocate {
                size: self.size()?,
                // One in three is aligned.
                alignment: if code % 10 == 2 { self.byte()? } else { 0 },
                buffer: code >= 128,
                contiguous: code / 10 % 13 == 3,
            },
            3 | 4 => Op::Free { which: self.short()? },
            5 => Op::FreeUnderBuffer { which: self.short()? },
            6 => Op::FreeInvalid { which: self.short()?, offset: self.short()? },
            7 if code >= 128 => Op::FreeAll { order: self.byte()? },
            7 => Op::Trim { pages: self.byte()? },
            8 => Op::Fail { call: self.byte()?, after: self.byte()?, fatal: code >= 128 },
            _ => Op::Amid { after: self.byte()?, which: self.short()?, trim: code >= 128 },
        })
    }
}

/// The sequence that bytes stand for.
#[must_use]
pub fn decode(data: &[u8]) -> (Setup, Vec<Op>) {
    let mut reader = Reader(data);
    let mut field = || reader.byte().unwrap_or(0);
    let setup = Setup {
        device: field(),
        memory_pages: field(),
        maximum_pages: field(),
        initial_pages: field(),
        growth_pages: field(),
        placement: field(),
    };
    let ops = std::iter::from_fn(|| reader.op()).take(MAX_OPS).collect();
    (setup, ops)
}

/// Bytes that stand for a sequence: what a failing property test becomes a corpus file by.
#[must_use]
pub fn encode(setup: Setup, ops: &[Op]) -> Vec<u8> {
    let mut bytes = vec![setup.device, setup.memory_pages, setup.maximum_pages, setup.initial_pages, setup.growth_pages, setup.placement];
    let sized = |size: Size| [size.exponent, size.fraction as u8, (size.fraction >> 8) as u8];
    for op in ops {
        let high = |code: u8, flag: bool| if flag { code + 130 } else { code };
        match *op {
            Op::Allocate { size, alignment, buffer, contiguous } => {
                let contiguous = if contiguous { 30 } else { 0 };
                bytes.push(high(if alignment == 0 { 0 } else { 2 } + contiguous, buffer));
                bytes.extend(sized(size));
                if alignment != 0 {
                    bytes.push(alignment);
                }
            }
            Op::Free { which } => {
                bytes.push(3);
                bytes.extend(which.to_le_bytes());
            }
            Op::FreeUnderBuffer { which } => {
                bytes.push(5);
                bytes.extend(which.to_le_bytes());
            }
            Op::FreeInvalid { which, offset } => {
                bytes.push(6);
                bytes.extend(which.to_le_bytes());
                bytes.extend(offset.to_le_bytes());
            }
            Op::Reserve { size } => {
                bytes.push(73);
                bytes.extend(sized(size));
            }
            Op::Draw { which, size, alignment, buffer } => {
                bytes.extend([high(if alignment == 0 { 74 } else { 75 }, buffer), which]);
                bytes.extend(sized(size));
                if alignment != 0 {
                    bytes.push(alignment);
                }
            }
            Op::EndReservation { which } => bytes.extend([76, which]),
            Op::Grow { which, size } => {
                bytes.push(77);
                bytes.extend(which.to_le_bytes());
                bytes.extend(sized(size));
            }
            Op::Trim { pages } => bytes.extend([7, pages]),
            Op::FreeAll { order } => bytes.extend([high(7, true), order]),
            Op::Fail { call, after, fatal } => bytes.extend([high(8, fatal), call, after]),
            Op::Amid { after, which, trim } => {
                bytes.extend([high(9, trim), after]);
                bytes.extend(which.to_le_bytes());
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_is_read_back_as_it_was_written() {
        let setup = Setup { device: 1, memory_pages: 2, maximum_pages: 3, initial_pages: 4, growth_pages: 5, placement: 6 };
        let size = Size { exponent: 20, fraction: 700 };
        let mut ops = vec![
            Op::Free { which: 258 },
            Op::FreeUnderBuffer { which: 3 },
            Op::FreeInvalid { which: 4, offset: 513 },
            Op::Trim { pages: 9 },
            Op::FreeAll { order: 2 },
            Op::Reserve { size },
            Op::EndReservation { which: 4 },
            Op::Grow { which: 300, size },
        ];
        for flag in [false, true] {
            for contiguous in [false, true] {
                ops.push(Op::Allocate { size, alignment: 0, buffer: flag, contiguous });
                ops.push(Op::Allocate { size, alignment: 21, buffer: flag, contiguous });
            }
            ops.push(Op::Draw { which: 7, size, alignment: 0, buffer: flag });
            ops.push(Op::Draw { which: 7, size, alignment: 20, buffer: flag });
            ops.push(Op::Fail { call: 1, after: 2, fatal: flag });
            ops.push(Op::Amid { after: 3, which: 700, trim: flag });
        }
        assert_eq!(decode(&encode(setup, &ops)), (setup, ops));
    }

    #[test]
    fn any_bytes_are_a_sequence() {
        assert_eq!(decode(&[]), (Setup::default(), Vec::new()));
        let cut = encode(Setup::default(), &[Op::Free { which: 1 }, Op::Free { which: 2 }]);
        assert_eq!(decode(&cut[..cut.len() - 1]).1, [Op::Free { which: 1 }]);
        assert_eq!(decode(&[255; 50_000]).1.len(), MAX_OPS);
    }
}

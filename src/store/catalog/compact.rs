//! Writing a log without what is of no use any more.

use crate::store::{
    disk::{data_dir::DataDir, root::Temp},
    error::StoreError,
};

use super::{Image, Row, TokenRun, frame, record};

/// Bytes of one write.
const CHUNK: usize = 1 << 20;

/// A log that is being written.
struct Out<'a> {
    dir: &'a DataDir,
    temp: &'a Temp,
    epoch: u64,
    /// Bytes written.
    at: u64,
    buffer: Vec<u8>,
    body: Vec<u8>,
}

// === impl Out ===

impl Out<'_> {
    fn frame(&mut self, encode: impl FnOnce(&mut Vec<u8>)) -> Result<(), StoreError> {
        self.body.clear();
        encode(&mut self.body);
        let at = self.at + self.buffer.len() as u64;
        frame::frame(self.epoch, at, &self.body, &mut self.buffer);
        if self.buffer.len() >= CHUNK {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), StoreError> {
        self.dir.root.write(self.temp, self.at, &self.buffer)?;
        self.at += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

/// Writes what an image says, with the runs of tokens that `place` makes of those that there are.
/// Returns the length, and the new number of each old row.
pub(super) fn write(
    dir: &DataDir,
    temp: &Temp,
    image: &Image,
    epoch: u64,
    place: &mut dyn FnMut(&mut Vec<TokenRun>),
) -> Result<(u64, Vec<u32>), StoreError> {
    let mut out = Out {
        dir,
        temp,
        epoch,
        at: 0,
        buffer: frame::header(epoch).to_vec(),
        body: Vec::new(),
    };
    for owner in image.owners() {
        out.frame(|body| record::encode_owner(owner, body))?;
    }
    let mut numbers = vec![u32::MAX; image.len() as usize];
    let mut next = 0_u32;
    let mut row = Row::blank();
    for number in image.numbers() {
        if !image.row(number, &mut row) {
            continue;
        }
        let base = row
            .base
            .and_then(|base| numbers.get(base as usize).copied());
        match base.filter(|base| *base != u32::MAX) {
            Some(base) => row.base = Some(base),
            None if row.base.is_some() => {
                // What it continued is gone: it stands for itself.
                let lost = || StoreError::invalid(format!("the row of {}", row.snapshot));
                row.kv = image.kv_of(number).ok_or_else(lost)?;
                row.runs = image.runs_of(number);
                (row.base, row.shared, row.from) = (None, 0, 0);
            }
            None => {}
        }
        place(&mut row.runs);
        out.frame(|body| record::encode_row(&row, next, body))?;
        if let Some(slot) = numbers.get_mut(number as usize) {
            *slot = next;
        }
        next += 1;
    }
    for ((fingerprint, folder), stamp) in &image.stamps {
        out.frame(|body| record::encode_stamp(fingerprint, *folder, *stamp, body))?;
    }
    for (object, fingerprint) in &image.maybe {
        out.frame(|body| record::encode_begin(fingerprint, *object, body))?;
    }
    for snapshot in &image.doubts {
        out.frame(|body| record::encode_doubt(*snapshot, body))?;
    }
    out.flush()?;
    Ok((out.at, numbers))
}

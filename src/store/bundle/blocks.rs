//! KV of other tokens than those that lie together.

use crate::{pool::Geometry, types::TokenRange};

/// Copies the KV of `rows` between two runs of packed KV, each of the tokens beside it, laid out
/// `[layer][K|V][token]`. What `rows` has beyond either run is not copied.
pub fn copy_rows(
    geometry: &Geometry,
    rows: TokenRange,
    (from, from_range): (&[u8], TokenRange),
    (to, to_range): (&mut [u8], TokenRange),
) {
    let start = rows.start.max(from_range.start).max(to_range.start);
    let end = rows.end.min(from_range.end).min(to_range.end);
    let Some(count) = end.checked_sub(start).filter(|count| *count > 0) else {
        return;
    };
    let (mut from_at, mut to_at) = (0_usize, 0_usize);
    for layer in geometry.kv_layers() {
        for row in [layer.k_row(), layer.v_row()] {
            // A row is at most 1 MiB.
            let row = row as usize;
            let place = |at: usize, range: TokenRange| at + row * (start - range.start) as usize;
            let len = row * count as usize;
            let (source, target) = (place(from_at, from_range), place(to_at, to_range));
            let source = from.get(source..source + len);
            let target = to.get_mut(target..target + len);
            if let Some((source, target)) = source.zip(target) {
                target.copy_from_slice(source);
            }
            from_at += row * from_range.len() as usize;
            to_at += row * to_range.len() as usize;
        }
    }
}

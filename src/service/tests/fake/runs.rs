//! What moves in runs of several pieces.

use std::ops::Range;

use super::*;
use crate::proto::channel::run::places;

impl Fake {
    /// Where pieces of a run lie from the start of the ring on, and the bytes of all.
    fn run(parts: &[TokenRange], run: &Range<usize>) -> (Vec<u64>, u64) {
        let sizes = parts[run.clone()].iter();
        places(0, sizes.map(|part| u64::from(part.len()) * ROW)).unwrap()
    }

    /// Waits until each piece of a run is answered, once.
    async fn answered(&mut self, run: Range<usize>, answer: impl Fn(&Down) -> Option<(u32, u32)>) {
        let mut left: Vec<u32> = (run.start as u32..run.end as u32).collect();
        while !left.is_empty() {
            let (index, count) = self.hear(&answer).await;
            for index in index..index + count {
                let at = left.iter().position(|left| *left == index);
                left.remove(at.expect("each piece is answered once"));
            }
        }
    }

    /// Gathers a run of KV and waits until all of it is drained.
    pub async fn drain_run(
        &mut self,
        save: u64,
        tokens: &[TokenId],
        parts: &[TokenRange],
        run: Range<usize>,
    ) {
        let (starts, bytes) = Self::run(parts, &run);
        for (part, at) in parts[run.clone()].iter().zip(starts) {
            let kv = kv_bytes(self.seed, tokens, *part);
            self.ring.write(at, &kv).unwrap();
        }
        let (index, count) = (run.start as u32, run.len() as u32);
        self.say(Drain {
            save,
            piece: Piece::Kv,
            index,
            count,
            ring_offset: 0,
            bytes,
        });
        self.answered(run.clone(), |message| match message {
            Down::Drained(it) if it.save == save => {
                assert_eq!((it.piece, it.status), (Piece::Kv, Status::Ok));
                Some((it.index, it.count))
            }
            _ => None,
        })
        .await;
    }

    /// Fills a run of KV and compares each byte.
    pub async fn fill_run(
        &mut self,
        lease: u64,
        tokens: &[TokenId],
        parts: &[TokenRange],
        run: Range<usize>,
    ) {
        let (starts, bytes) = Self::run(parts, &run);
        self.ring.fill(0, bytes, 0xee).unwrap();
        let (index, count) = (run.start as u32, run.len() as u32);
        self.say(Fill {
            lease,
            piece: Piece::Kv,
            index,
            count,
            ring_offset: 0,
            bytes,
        });
        self.answered(run.clone(), |message| match message {
            Down::Filled(it) if it.lease == lease => {
                assert_eq!((it.piece, it.status), (Piece::Kv, Status::Ok));
                Some((it.index, it.count))
            }
            _ => None,
        })
        .await;
        for (part, at) in parts[run].iter().zip(starts) {
            let mut got = vec![0; part.len() as usize * ROW as usize];
            self.ring.read(at, &mut got).unwrap();
            assert!(got == kv_bytes(self.seed, tokens, *part), "foreign KV");
        }
    }
}

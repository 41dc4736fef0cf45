//! A worker's saves.

use super::*;

impl Worker {
    /// Offers the state at a boundary.
    pub fn offer(&mut self, req: u64, boundary: u32) -> u64 {
        let save = self.fresh();
        self.say(Offer {
            save,
            req,
            attempt: 0,
            boundary,
            epoch: self.epoch,
        });
        save
    }

    /// The answer to an offer: KV that is wanted, or a decline.
    pub fn answer(&mut self, save: u64) -> Result<Vec<Range>, DeclineReason> {
        self.hear(|message| match message {
            Down::Want(want) if want.save == save => {
                assert!(want.need_state);
                Some(Ok(ranges(&want.parts)))
            }
            Down::Decline(decline) if decline.save == save => Some(Err(decline.reason)),
            // Superseded before it was answered.
            Down::Saved(saved) if saved.save == save => panic!("{saved:?}"),
            _ => None,
        })
    }

    /// Room in the ring for a piece. It is reused without asking: one piece moves at a time.
    pub fn place(&mut self, bytes: u64) -> u64 {
        if self.at + bytes > RING {
            self.at = 0;
        }
        self.at += bytes;
        self.at - bytes
    }

    /// Gathers one piece and waits until it is drained.
    pub fn drain(&mut self, save: u64, piece: Piece, index: u32, bytes: &[u8]) -> Status {
        let ring_offset = self.place(bytes.len() as u64);
        self.ring.write(ring_offset, bytes).unwrap();
        self.drain_at(save, piece, index, (ring_offset, bytes.len() as u64))
    }

    /// Says that a piece lies somewhere, and waits for the answer.
    pub fn drain_at(
        &mut self,
        save: u64,
        piece: Piece,
        index: u32,
        (ring_offset, bytes): (u64, u64),
    ) -> Status {
        self.say(Drain {
            save,
            piece,
            index,
            count: 1,
            ring_offset,
            bytes,
        });
        self.hear(|message| match message {
            Down::Drained(it) if (it.save, it.piece, it.index) == (save, piece, index) => {
                Some(it.status)
            }
            _ => None,
        })
    }

    /// Drains all KV parts and the state at the end of `tokens`.
    pub fn drain_all(&mut self, save: u64, tokens: &[u32], parts: &[Range]) {
        for (part, index) in parts.iter().zip(0..) {
            let bytes = self.model.kv(tokens, part);
            assert_eq!(self.drain(save, Piece::Kv, index, &bytes), Status::Ok);
        }
        let bytes = self.model.state(tokens);
        assert_eq!(self.drain(save, Piece::State, 0, &bytes), Status::Ok);
    }

    /// How a save ended.
    pub fn saved(&mut self, save: u64) -> Result<Uuid, Status> {
        self.hear(|message| match message {
            Down::Saved(saved) if saved.save == save => Some(match saved.status {
                Status::Ok => Ok(Uuid::from_bytes(saved.snapshot)),
                status => Err(status),
            }),
            _ => None,
        })
    }

    /// Saves the state at a boundary of an open request.
    pub fn save_at(&mut self, req: u64, tokens: &[u32], boundary: u32) -> SaveEnd {
        let save = self.offer(req, boundary);
        match self.answer(save) {
            Err(reason) => SaveEnd::Declined(reason),
            Ok(parts) => {
                self.drain_all(save, &tokens[..boundary as usize], &parts);
                match self.saved(save) {
                    Ok(id) => SaveEnd::Saved(parts, id),
                    Err(status) => SaveEnd::Failed(status),
                }
            }
        }
    }

    /// A whole turn: a request, its state at the boundary, its end. Returns what was wanted.
    pub fn turn(&mut self, conversation: &str, tokens: &[u32], boundary: u32) -> Vec<Range> {
        let req = self.open(conversation, tokens);
        let end = self.save_at(req, tokens, boundary);
        self.finish(req, tokens.len());
        match end {
            SaveEnd::Saved(parts, _) => parts,
            other => panic!("{conversation}: {other:?}"),
        }
    }
}

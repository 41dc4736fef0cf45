//! A worker's restores.

use super::*;

impl Worker {
    /// Looks a prompt up.
    pub fn lookup(&mut self, req: u64, max_boundary: u32) -> LookupResult {
        self.say(Lookup {
            req,
            attempt: 0,
            max_boundary,
            device_boundary: 0,
            device_kv: 0,
        });
        self.hear(|message| match message {
            Down::LookupResult(result) if result.req == req => Some(result.clone()),
            _ => None,
        })
    }

    /// Asks for a piece and waits until it is in the ring.
    pub fn fill(
        &mut self,
        lease: u64,
        piece: Piece,
        index: u32,
        bytes: u64,
    ) -> Result<Vec<u8>, Status> {
        let ring_offset = self.place(bytes);
        self.ring.fill(ring_offset, bytes, 0xee).unwrap();
        match self.fill_at(lease, piece, index, (ring_offset, bytes)) {
            Status::Ok => {
                let mut out = vec![0; bytes as usize];
                self.ring.read(ring_offset, &mut out).unwrap();
                Ok(out)
            }
            status => Err(status),
        }
    }

    /// Asks for a piece at a place in the ring, and waits for the answer.
    pub fn fill_at(
        &mut self,
        lease: u64,
        piece: Piece,
        index: u32,
        (ring_offset, bytes): (u64, u64),
    ) -> Status {
        self.say(Fill {
            lease,
            piece,
            index,
            count: 1,
            ring_offset,
            bytes,
        });
        self.hear(|message| match message {
            Down::Filled(it) if (it.lease, it.piece, it.index) == (lease, piece, index) => {
                Some(it.status)
            }
            _ => None,
        })
    }

    /// Fills everything of a lease and compares each byte that belongs to the prompt.
    pub fn fill_all(&mut self, hit: &LookupResult, tokens: &[u32]) -> Result<(), Status> {
        let model = self.model.clone();
        let parts = ranges(&hit.parts);
        let tokens = &tokens[..hit.boundary as usize];
        let mut next = hit.kv_from;
        for ((part, index), after) in parts
            .iter()
            .zip(0..)
            .zip(parts.iter().skip(1).chain([&(0..0)]))
        {
            let bytes = part.len() as u64 * model.row_bytes();
            let got = self.fill(hit.lease, Piece::Kv, index, bytes)?;
            // A piece counts up to where the next one begins.
            let end = if after.is_empty() {
                hit.boundary
            } else {
                after.start
            };
            let used = next.max(part.start)..end.min(part.end);
            model.check_kv(tokens, part, &used, &got);
            next = used.end;
        }
        assert_eq!(next, hit.boundary, "all KV must come: {parts:?}");
        let got = self.fill(hit.lease, Piece::State, 0, model.state_bytes())?;
        assert!(got == model.state(tokens), "foreign state");
        Ok(())
    }

    /// Restores the longest prefix of `tokens`, checks every byte, and lets go. `None`: a miss.
    pub fn restore(&mut self, tokens: &[u32]) -> Option<Got> {
        self.restore_as(&Names::default(), tokens)
    }

    /// The same with names.
    pub fn restore_as(&mut self, names: &Names, tokens: &[u32]) -> Option<Got> {
        let got = self.try_restore(names, tokens);
        got.unwrap_or_else(|status| panic!("a restore failed: {status:?}"))
    }

    /// The same; the error is that of the first piece that did not come.
    pub fn try_restore(&mut self, names: &Names, tokens: &[u32]) -> Result<Option<Got>, Status> {
        let req = self.open_as(names, tokens);
        let hit = self.lookup(req, tokens.len() as u32);
        let close = RequestClose { req };
        if hit.lease == 0 {
            self.say(close);
            return Ok(None);
        }
        let filled = self.fill_all(&hit, tokens);
        let (outcome, reused) = match filled {
            Ok(()) => (Outcome::Used, hit.boundary),
            Err(_) => (Outcome::FillFailed, 0),
        };
        self.say(Release {
            lease: hit.lease,
            outcome,
            reused,
        });
        self.say(close);
        filled?;
        Ok(Some(Got {
            boundary: hit.boundary,
            parts: ranges(&hit.parts),
            tier: hit.tier.unwrap(),
            bytes: hit.bytes,
        }))
    }
}

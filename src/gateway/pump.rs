//! A stream that is read ahead of its client.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::Bodies;

/// Bytes that wait for the client; a single piece may be longer.
const AHEAD: usize = 256 << 10;

/// A piece, and its part of the room.
type Piece = (Result<Bytes, io::Error>, OwnedSemaphorePermit);

/// Reads a stream to its end, or until its client is gone, by itself. The stream is dropped with either.
pub(super) fn read_ahead(
    stream: impl Stream<Item = Result<Bytes, io::Error>> + Send + 'static,
) -> Bodies {
    let (sender, receiver) = mpsc::unbounded_channel::<Piece>();
    let room = Arc::new(Semaphore::new(AHEAD));
    tokio::spawn(async move {
        let mut stream = std::pin::pin!(stream);
        let pumped = async {
            while let Some(piece) = stream.next().await {
                let bytes = piece.as_ref().map_or(1, Bytes::len).clamp(1, AHEAD);
                let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
                let Ok(part) = Arc::clone(&room).acquire_many_owned(bytes).await else {
                    return;
                };
                if sender.send((piece, part)).is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = pumped => {}
            () = sender.closed() => {}
        }
    });
    Box::pin(futures_util::stream::unfold(
        receiver,
        |mut receiver| async move {
            let (piece, _part) = receiver.recv().await?;
            Some((piece, receiver))
        },
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    struct Gone(Arc<AtomicUsize>);

    impl Drop for Gone {
        fn drop(&mut self) {
            self.0.store(usize::MAX, Ordering::SeqCst);
        }
    }

    fn pieces(
        count: usize,
        len: usize,
    ) -> (
        impl Stream<Item = Result<Bytes, io::Error>>,
        Arc<AtomicUsize>,
    ) {
        let taken = Arc::new(AtomicUsize::new(0));
        let gone = Gone(Arc::clone(&taken));
        let stream = futures_util::stream::unfold((0, gone), move |(at, gone)| async move {
            if at == count {
                return None;
            }
            gone.0.store(at + 1, Ordering::SeqCst);
            Some((Ok(Bytes::from(vec![at as u8; len])), (at + 1, gone)))
        });
        (stream, taken)
    }

    async fn until(what: impl Fn() -> bool) {
        while !what() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn it_ends_without_its_client_and_loses_nothing() {
        let (stream, taken) = pieces(100, 1000);
        let bodies = read_ahead(stream);
        until(|| taken.load(Ordering::SeqCst) == usize::MAX).await;
        let read: Vec<_> = bodies.map(|piece| piece.unwrap()[0]).collect().await;
        assert_eq!(read, (0..100).collect::<Vec<u8>>());
    }

    #[tokio::test]
    async fn it_is_bounded_and_ends_with_its_client() {
        let (stream, taken) = pieces(100, 100 << 10);
        let mut bodies = read_ahead(stream);
        // Two fit, the third waits.
        until(|| taken.load(Ordering::SeqCst) == 3).await;
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(taken.load(Ordering::SeqCst), 3);
        bodies.next().await.unwrap().unwrap();
        until(|| taken.load(Ordering::SeqCst) == 4).await;
        drop(bodies);
        until(|| taken.load(Ordering::SeqCst) == usize::MAX).await;
    }
}

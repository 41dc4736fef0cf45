//! Connections whose client takes nothing.
//!
//! A client that reads slowly has all the time it needs; one that takes no byte for a while holds a
//! connection, and what is behind it, for nothing.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// A stream whose writes fail once none of them got on for so long.
#[derive(Debug)]
pub(super) struct Stall<S> {
    inner: S,
    patience: Duration,
    /// The end of patience, while a write waits.
    until: Pin<Box<Sleep>>,
    waits: bool,
}

// === impl Stall ===

impl<S> Stall<S> {
    pub fn new(inner: S, patience: Duration) -> Self {
        Self {
            inner,
            patience,
            until: Box::pin(tokio::time::sleep(patience)),
            waits: false,
        }
    }

    /// What a write came to, unless it waits for too long.
    fn watch<T>(
        &mut self,
        context: &mut Context<'_>,
        wrote: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if wrote.is_ready() {
            self.waits = false;
            return wrote;
        }
        if !std::mem::replace(&mut self.waits, true) {
            self.until.as_mut().reset(Instant::now() + self.patience);
        }
        ready!(self.until.as_mut().poll(context));
        let text = "the client takes nothing (rest.write_timeout)";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, text)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Stall<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Stall<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.watch(context, wrote)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.inner).poll_write_vectored(context, bytes);
        self.watch(context, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let wrote = Pin::new(&mut self.inner).poll_flush(context);
        self.watch(context, wrote)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let wrote = Pin::new(&mut self.inner).poll_shutdown(context);
        self.watch(context, wrote)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn a_write_that_nobody_takes_fails_and_a_slow_one_does_not() {
        let (ours, mut theirs) = tokio::io::duplex(16);
        let mut stall = Stall::new(ours, Duration::from_secs(2));
        // Byte by byte, with pauses that add up to more than the patience.
        let slow = tokio::spawn(async move {
            for _ in 0..64 {
                tokio::time::sleep(Duration::from_millis(40)).await;
                theirs.read_u8().await.unwrap();
            }
            theirs
        });
        stall.write_all(&[1; 64]).await.unwrap();
        let _theirs = slow.await.unwrap();
        let error = stall.write_all(&[1; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}

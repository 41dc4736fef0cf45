//! What signs: HMAC-SHA256 over id, time and body, as Standard Webhooks has it.

use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, Mac as _};
use sha2::Sha256;

/// What secrets in base64 begin with.
const PREFIX: &str = "whsec_";

/// The longest line of a file.
const LINE_MAX: usize = 4096;

/// A key. It is never printed.
#[derive(Clone)]
pub struct Secret {
    key: Vec<u8>,
}

/// Why a file holds no secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// It cannot be read.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// It is not one secret.
    #[error(
        "{}: neither `whsec_` and base64 of 24 to 64 bytes, nor one line of 16 to 4096 visible ASCII \
         characters",
        path.display()
    )]
    Malformed {
        /// The file.
        path: PathBuf,
    },
}

// === impl Secret ===

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// Reads it from the first and only line of a file.
    ///
    /// # Errors
    /// See [`SecretError`].
    pub fn read(path: &Path) -> Result<Self, SecretError> {
        let io = |error| SecretError::Io {
            path: path.into(),
            error,
        };
        let mut bytes = Vec::new();
        // As long as a line may be, its end, and one more: enough to see that it is too long.
        std::fs::File::open(path)
            .map_err(io)?
            .take(LINE_MAX as u64 + 3)
            .read_to_end(&mut bytes)
            .map_err(io)?;
        let text = std::str::from_utf8(&bytes).ok().and_then(Self::parse);
        text.ok_or_else(|| SecretError::Malformed { path: path.into() })
    }

    fn parse(text: &str) -> Option<Self> {
        let text = text.strip_suffix('\n').unwrap_or(text);
        let text = text.strip_suffix('\r').unwrap_or(text);
        let key = match text.strip_prefix(PREFIX) {
            Some(text) => {
                let key = STANDARD.decode(text).ok()?;
                (24..=64).contains(&key.len()).then_some(key)?
            }
            None => {
                let visible = text.bytes().all(|byte| byte.is_ascii_graphic());
                let good = visible && (16..=LINE_MAX).contains(&text.len());
                good.then(|| text.as_bytes().to_vec())?
            }
        };
        Some(Self { key })
    }

    /// The header `webhook-signature` of a message.
    pub fn sign(&self, id: &str, seconds: u64, body: &[u8]) -> String {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.key).expect("a key of any length is good");
        mac.update(format!("{id}.{seconds}.").as_bytes());
        mac.update(body);
        format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the Standard Webhooks specification.
    #[test]
    fn signatures_are_those_of_the_standard() {
        let secret = Secret::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n").unwrap();
        let id = "msg_p5jXN8AQM9LWM0D4loKWxJek";
        let signature = secret.sign(id, 1_614_265_330, br#"{"test": 2432232314}"#);
        assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        assert_eq!(format!("{secret:?}"), "Secret(..)");
    }

    #[test]
    fn only_one_line_with_a_secret_is_one() {
        let long = "x".repeat(LINE_MAX);
        for good in ["0123456789abcdef", "0123456789abcdef\r\n", &long] {
            assert!(Secret::parse(good).is_some(), "{good}");
        }
        let short = format!("whsec_{}", STANDARD.encode([1; 23]));
        for bad in [
            "",
            "short\n",
            "0123456789abcde f",
            "0123456789\n0123456789",
            "whsec_!",
            &short,
            &format!("{long}x"),
        ] {
            assert!(Secret::parse(bad).is_none(), "{bad}");
        }
    }
}

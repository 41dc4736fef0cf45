//! A shared secret from a file, as it comes in an `Authorization` header or beside a request.

use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// A shared secret. Only its digest is kept, and it is never printed.
#[derive(Clone)]
pub struct Token {
    digest: blake3::Hash,
}

/// Why a token file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file cannot be read.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The file does not hold exactly one usable token.
    #[error("{}: not one line of 16 to 4096 visible ASCII characters", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
    },
}

/// Longest token in bytes.
const TOKEN_MAX: usize = 4096;

// === impl Token ===

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// Reads the token from the first and only line of a file.
    ///
    /// # Errors
    /// The file cannot be read, or holds something else than one token.
    pub fn read(path: &Path) -> Result<Token, TokenError> {
        let io = |error| TokenError::Io {
            path: path.into(),
            error,
        };
        let malformed = || TokenError::Malformed { path: path.into() };
        let mut bytes = Vec::new();
        // One byte more than a token with its line end may have: enough to see that it is too long.
        std::fs::File::open(path)
            .map_err(io)?
            .take(TOKEN_MAX as u64 + 3)
            .read_to_end(&mut bytes)
            .map_err(io)?;
        let text = std::str::from_utf8(&bytes).map_err(|_| malformed())?;
        let text = text.strip_suffix('\n').unwrap_or(text);
        let text = text.strip_suffix('\r').unwrap_or(text);
        let visible = text.bytes().all(|byte| byte.is_ascii_graphic());
        if !visible || !(16..=TOKEN_MAX).contains(&text.len()) {
            return Err(malformed());
        }
        Ok(Token::new(text))
    }

    /// A token from its text.
    pub fn new(text: &str) -> Token {
        Token {
            digest: blake3::hash(text.as_bytes()),
        }
    }

    /// Whether `given` is this token. The time taken does not depend on where the two differ:
    /// digests are compared, in constant time.
    pub fn is(&self, given: &[u8]) -> bool {
        blake3::hash(given) == self.digest
    }

    /// Whether an `Authorization` header carries this token as `Bearer`.
    pub fn admits(&self, authorization: Option<&[u8]>) -> bool {
        let Some((scheme, given)) = authorization.and_then(|value| value.split_at_checked(7))
        else {
            return false;
        };
        scheme.eq_ignore_ascii_case(b"bearer ") && self.is(given.trim_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_itself_is_admitted() {
        let token = Token::new("0123456789abcdef");
        assert!(token.admits(Some(b"Bearer 0123456789abcdef")));
        assert!(token.admits(Some(b"bearer 0123456789abcdef ")));
        for other in [
            &b"Bearer 0123456789abcdeF"[..],
            b"Bearer 0123456789abcde",
            b"Bearer ",
            b"Bearer",
            b"",
            b"Basic 0123456789abcdef",
            b"0123456789abcdef",
            b"Bearer 0123456789abcdef0",
            b"\xff\xfe",
        ] {
            assert!(!token.admits(Some(other)), "{other:?}");
        }
        assert!(!token.admits(None));
        assert_eq!(format!("{token:?}"), "Token(..)");
    }

    #[test]
    fn token_files_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let try_with = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            Token::read(&path)
        };
        assert!(
            try_with(b"0123456789abcdef\n")
                .unwrap()
                .admits(Some(b"Bearer 0123456789abcdef"))
        );
        assert!(try_with(b"0123456789abcdef\r\n").is_ok());
        let longest = vec![b'x'; 4096];
        assert!(try_with(&longest).is_ok());
        assert!(try_with(&[&longest[..], b"x"].concat()).is_err());
        for bad in [
            &b""[..],
            b"short\n",
            b"0123456789abcdef\n\n",
            b"0123456789 abcdef",
            b"0123456789abcdef\xff",
            b"0123456789\0abcdef",
        ] {
            assert!(
                matches!(try_with(bad), Err(TokenError::Malformed { .. })),
                "{bad:?}"
            );
        }
        let missing = Token::read(&folder.path().join("none"));
        assert!(matches!(missing, Err(TokenError::Io { .. })));
    }
}

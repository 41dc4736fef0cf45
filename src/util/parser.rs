//! What is known of a parser of bytes from outside, so that one suite can try them all.
//!
//! Every such parser is a plain function of bytes. Each layer lists its own, in a module `parsers`
//! of its tests; the suite stands where all layers are seen, in `app::parsers`.

/// A parser, with inputs to begin with.
pub struct Parser {
    /// Its folder in the corpus.
    pub name: &'static str,
    /// Takes the bytes, or says why not. What it took comes back as the bytes that this program
    /// writes for the same value.
    pub parse: fn(&[u8]) -> Result<Vec<u8>, String>,
    /// A value has one form: what is taken is written the same. Otherwise what is written is taken
    /// again, and then written the same.
    pub exact: bool,
    /// Makes the checksums right again, so that what is behind them is reached, too.
    pub seal: Option<fn(&mut Vec<u8>)>,
    /// Most memory that it may hold at any time, in bytes for each byte of the input.
    pub factor: u64,
    /// Inputs that are taken.
    pub valid: fn() -> Vec<Case>,
    /// Inputs that are refused.
    pub hostile: fn() -> Vec<Refused>,
}

/// An input, and what it is called.
pub type Case = (String, Vec<u8>);

/// An input that is refused, and a part of what is said then.
pub type Refused = (String, Vec<u8>, String);

/// Beside [`Parser::factor`]: what an error, a table or a first growth takes.
pub const BASE: u64 = 64 << 10;

/// An input with a short name.
pub fn case(name: &str, bytes: impl Into<Vec<u8>>) -> Case {
    (name.into(), bytes.into())
}

/// An input that is refused.
pub fn refused(name: &str, bytes: impl Into<Vec<u8>>, why: &str) -> Refused {
    (name.into(), bytes.into(), why.into())
}

/// An error as the suite has it.
pub fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

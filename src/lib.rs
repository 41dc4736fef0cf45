//! A durable memory for language models with a recurrent state, beside an unmodified SGLang.

#![deny(clippy::unwrap_used, clippy::indexing_slicing)]

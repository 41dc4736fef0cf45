//! A durable memory for language models with a recurrent state, beside an unmodified SGLang.

pub mod proto;

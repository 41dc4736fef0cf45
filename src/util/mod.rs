//! Small tools without knowledge of the domain.

pub mod clock;
pub mod id_map;
#[cfg(test)]
pub mod parser;
pub mod secret;
pub mod socket;

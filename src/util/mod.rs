//! Small tools without knowledge of the domain.

pub mod clock;
pub mod id_map;
pub mod secret;
pub mod socket;

//! Small tools without knowledge of the domain.

pub mod clock;
pub mod secret;
pub mod socket;

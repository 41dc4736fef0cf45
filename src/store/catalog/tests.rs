//! The catalog against crashes and damage.

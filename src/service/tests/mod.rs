//! Tests of the whole service.

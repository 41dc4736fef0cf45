//! Element types of pool tensors.

use serde::{Deserialize, Serialize};

use super::GeometryError;
use crate::proto::v1;

/// Type of one element; the names are those of safetensors.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DType {
    /// Unsigned byte, or bytes whose type is not said.
    U8,
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
    /// IEEE single.
    F32,
    /// 8-bit float, 4 bits of exponent.
    #[serde(rename = "F8_E4M3")]
    F8E4M3,
    /// 8-bit float, 5 bits of exponent.
    #[serde(rename = "F8_E5M2")]
    F8E5M2,
}

// === impl DType ===

impl DType {
    /// All types.
    pub const ALL: [Self; 6] = [
        Self::U8,
        Self::F16,
        Self::BF16,
        Self::F32,
        Self::F8E4M3,
        Self::F8E5M2,
    ];

    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::U8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
        }
    }

    /// The name, as in a safetensors header.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::U8 => "U8",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::F32 => "F32",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E5M2 => "F8_E5M2",
        }
    }

    /// From the number on the wire.
    pub fn from_wire(number: i32) -> Result<Self, GeometryError> {
        match v1::DType::try_from(number) {
            Ok(v1::DType::DtypeU8) => Ok(Self::U8),
            Ok(v1::DType::DtypeF16) => Ok(Self::F16),
            Ok(v1::DType::DtypeBf16) => Ok(Self::BF16),
            Ok(v1::DType::DtypeF32) => Ok(Self::F32),
            Ok(v1::DType::DtypeF8E4m3) => Ok(Self::F8E4M3),
            Ok(v1::DType::DtypeF8E5m2) => Ok(Self::F8E5M2),
            Ok(v1::DType::DtypeUnspecified) | Err(_) => Err(GeometryError::DType(number)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_agree_with_serde() {
        for dtype in DType::ALL {
            assert_eq!(serde_json::to_value(dtype).unwrap(), dtype.as_str());
        }
    }

    #[test]
    fn every_number_is_a_type_or_an_error() {
        let known: Vec<DType> = (-1..100).filter_map(|n| DType::from_wire(n).ok()).collect();
        assert_eq!(known, DType::ALL);
    }
}

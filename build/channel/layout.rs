//! The module `layout`: numbers, header, enums, flags, handshake.

use std::fmt::Write;

use toml::Table;

use super::messages::structure;
use super::{Choice, Result, Types, array, doc, fields, number, pascal, table, text};

pub(super) fn layout(
    out: &mut String,
    root: &Table,
    handshake: &Table,
    enums: &[Choice],
    flags: &[Choice],
    types: &Types,
) -> Result<()> {
    writeln!(
        out,
        "/// Numbers of the channel: header, records, enums, flags, handshake."
    )?;
    writeln!(out, "pub mod layout {{")?;
    writeln!(out, "use serde::{{Deserialize, Serialize}};\n")?;
    writeln!(
        out,
        "use crate::proto::channel::codec::{{Cursor, DecodeError, put}};\n"
    )?;
    for (name, kind, doc) in [
        (
            "version",
            "u32",
            "Version of the layout; peers whose versions differ do not talk.",
        ),
        ("magic", "u64", "First word of the header: \"ENGRMCH1\"."),
        ("header_bytes", "u64", "Size of the header in bytes."),
        (
            "up_capacity",
            "u64",
            "Default size of the area worker -> daemon in bytes.",
        ),
        (
            "down_capacity",
            "u64",
            "Default size of the area daemon -> worker in bytes.",
        ),
        (
            "record_head_bytes",
            "u64",
            "Size of a record's head in bytes.",
        ),
        (
            "record_align",
            "u64",
            "Records take a multiple of this many bytes.",
        ),
        (
            "record_share",
            "u64",
            "A record takes at most this part (1/n) of its area.",
        ),
        (
            "area_align",
            "u64",
            "Start and size of an area are multiples of this.",
        ),
        ("min_capacity", "u64", "Smallest size of an area in bytes."),
        ("max_capacity", "u64", "Largest size of an area in bytes."),
        ("run_align", "u64", "Pieces of a run start at multiples of this from its start."),
    ] {
        let value = number(root, name)?;
        writeln!(
            out,
            "/// {doc}\npub const {}: {kind} = {value};",
            name.to_uppercase()
        )?;
    }
    header(out, table(root, "header")?)?;
    for choice in enums {
        enumeration(out, choice)?;
    }
    for choice in flags {
        flag_set(out, choice)?;
    }
    for (name, kind, doc) in [
        (
            "magic",
            "u64",
            "First word of both messages of the handshake: \"ENGRMFD1\".",
        ),
        (
            "self_test_bytes",
            "u64",
            "Bytes of the ring that the self-test uses.",
        ),
        (
            "max_reason_bytes",
            "usize",
            "Longest reason of a refusal in bytes.",
        ),
        (
            "max_descriptors",
            "usize",
            "Most descriptors that one side sends.",
        ),
    ] {
        let value = number(handshake, name)?;
        let name = name.to_uppercase();
        writeln!(
            out,
            "/// {doc}\npub const HANDSHAKE_{name}: {kind} = {value};"
        )?;
    }
    for (name, key, doc) in [
        (
            "HandshakeRequest",
            "request",
            "What the worker says on the socket for descriptors.",
        ),
        ("HandshakeReply", "reply", "What the daemon answers there."),
    ] {
        let fields = fields(array(handshake, key)?)?;
        structure(out, name, doc, &fields, types)?;
    }
    writeln!(out, "}}\n")?;
    Ok(())
}

fn header(out: &mut String, header: &Table) -> Result<()> {
    let mut words = Vec::new();
    for (name, word) in header {
        let word = word.as_table().ok_or("a header word is a table")?;
        words.push((
            number(word, "offset")?,
            text(word, "type")?,
            name,
            text(word, "doc")?,
        ));
    }
    words.sort();
    writeln!(
        out,
        "/// Offsets of the header's words in bytes.\npub mod header {{"
    )?;
    let mut free = 0;
    for (offset, kind, name, meaning) in words {
        let (bytes, align) = match kind.as_str() {
            "u32" => (4, 4),
            "u64" => (8, 8),
            "b16" => (16, 16),
            other => return Err(format!("no header word of type {other}").into()),
        };
        if offset < free || offset % align != 0 {
            return Err(format!("header word {name} overlaps or is not aligned").into());
        }
        free = offset + bytes;
        doc(out, 0, &format!("{meaning} ({kind})"))?;
        writeln!(out, "pub const {}: u64 = {offset};", name.to_uppercase())?;
    }
    writeln!(out, "}}")?;
    Ok(())
}

fn enumeration(out: &mut String, choice: &Choice) -> Result<()> {
    let Choice {
        name,
        doc: meaning,
        items,
    } = choice;
    doc(out, 0, meaning)?;
    writeln!(
        out,
        "#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug, Serialize, Deserialize)]\n\
         #[serde(rename_all = \"snake_case\")]\n#[repr(u32)]\npub enum {name} {{"
    )?;
    for item in items {
        doc(out, 4, &item.doc)?;
        writeln!(out, "    {} = {},", pascal(&item.name), item.value)?;
    }
    writeln!(out, "}}\n\nimpl {name} {{")?;
    let all: Vec<_> = items
        .iter()
        .map(|item| format!("Self::{}", pascal(&item.name)))
        .collect();
    writeln!(out, "    /// All values, ascending.")?;
    writeln!(
        out,
        "    pub const ALL: [Self; {}] = [{}];\n",
        items.len(),
        all.join(", ")
    )?;
    writeln!(out, "    /// The value with this number on the wire.")?;
    writeln!(
        out,
        "    pub const fn from_u32(value: u32) -> Option<Self> {{\n        match value {{"
    )?;
    for item in items {
        writeln!(
            out,
            "            {} => Some(Self::{}),",
            item.value,
            pascal(&item.name)
        )?;
    }
    writeln!(out, "            _ => None,\n        }}\n    }}\n")?;
    writeln!(out, "    /// Its number on the wire.")?;
    writeln!(
        out,
        "    pub const fn as_u32(self) -> u32 {{\n        self as u32\n    }}\n"
    )?;
    writeln!(out, "    /// Its name in logs and metrics.")?;
    writeln!(
        out,
        "    pub const fn as_str(self) -> &'static str {{\n        match self {{"
    )?;
    for item in items {
        writeln!(
            out,
            "            Self::{} => \"{}\",",
            pascal(&item.name),
            item.name
        )?;
    }
    writeln!(out, "        }}\n    }}\n}}\n")?;
    Ok(())
}

fn flag_set(out: &mut String, choice: &Choice) -> Result<()> {
    let Choice {
        name,
        doc: meaning,
        items,
    } = choice;
    doc(out, 0, meaning)?;
    writeln!(
        out,
        "#[derive(Copy, Clone, Eq, PartialEq, Hash, Default, Debug, Serialize, Deserialize)]\n\
         #[serde(transparent)]\npub struct {name}(u32);\n\nimpl {name} {{"
    )?;
    writeln!(out, "    /// No flag.\n    pub const NONE: Self = Self(0);")?;
    for item in items {
        doc(out, 4, &item.doc)?;
        writeln!(
            out,
            "    pub const {}: Self = Self({});",
            item.name.to_uppercase(),
            item.value
        )?;
    }
    let all = items.iter().fold(0, |all, item| all | item.value);
    writeln!(
        out,
        "    /// All flags.\n    pub const ALL: Self = Self({all});\n\n\
         \x20   /// The flags of this number; `None` if one of them is not known.\n\
         \x20   pub const fn from_u32(value: u32) -> Option<Self> {{\n\
         \x20       if value & !{all} == 0 {{ Some(Self(value)) }} else {{ None }}\n    }}\n\n\
         \x20   /// Their number on the wire.\n\
         \x20   pub const fn as_u32(self) -> u32 {{\n        self.0\n    }}\n\n\
         \x20   /// Whether all of `other` are set.\n\
         \x20   pub const fn contains(self, other: Self) -> bool {{\n\
         \x20       self.0 & other.0 == other.0\n    }}\n\n\
         \x20   /// These, and `other` if `on`.\n    #[must_use]\n\
         \x20   pub const fn with(self, other: Self, on: bool) -> Self {{\n\
         \x20       if on {{ Self(self.0 | other.0) }} else {{ self }}\n    }}\n}}\n"
    )?;
    Ok(())
}

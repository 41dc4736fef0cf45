//! Turns the description of the shared-memory channel into Rust.
//!
//! The result has two modules: `layout` (numbers, header, enums, flags, handshake) and `msg` (one
//! struct for each message, and the enums `Up` and `Down` over them). How a single field is written
//! and read is in `src/proto/channel/codec.rs`; here is only which fields follow each other.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Write;

use toml::{Table, Value};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// One named value of an enum, or one flag.
struct Item {
    name: String,
    value: u64,
    doc: String,
}

/// An enum or a set of flags.
struct Choice {
    name: String,
    doc: String,
    items: Vec<Item>,
}

/// One field of a message. `kind` is a base type (`u32`, `str`, …) or the name of a choice.
struct Field {
    name: String,
    kind: String,
    optional: bool,
    doc: String,
}

struct Message {
    name: String,
    kind: u64,
    up: bool,
    doc: String,
    fields: Vec<Field>,
}

/// What is needed to write a field of any type.
struct Types {
    enums: BTreeSet<String>,
    flags: BTreeSet<String>,
}

/// The text of `channel.rs`.
pub fn generate(description: &str) -> Result<String> {
    let root: Table = description.parse()?;
    let enums = choices(table(&root, "enums")?)?;
    let flags = choices(table(&root, "flags")?)?;
    let types = Types {
        enums: enums.iter().map(|choice| choice.name.clone()).collect(),
        flags: flags.iter().map(|choice| choice.name.clone()).collect(),
    };
    let handshake = table(&root, "handshake")?;
    let messages = messages(&root)?;

    let mut out = String::from("// Generated from channel.toml. Not for editing.\n\n");
    layout(&mut out, &root, handshake, &enums, &flags, &types)?;
    message_module(&mut out, &messages, &types)?;
    Ok(out)
}

// === reading the description ===

fn table<'a>(parent: &'a Table, key: &str) -> Result<&'a Table> {
    parent
        .get(key)
        .and_then(Value::as_table)
        .ok_or_else(|| format!("no table {key}").into())
}

fn array<'a>(parent: &'a Table, key: &str) -> Result<&'a [Value]> {
    let value = parent.get(key).and_then(Value::as_array);
    Ok(value.ok_or_else(|| format!("no array {key}"))?)
}

fn text(parent: &Table, key: &str) -> Result<String> {
    let value = parent.get(key).and_then(Value::as_str);
    Ok(value
        .ok_or_else(|| format!("no text {key}"))?
        .trim()
        .to_owned())
}

fn number(parent: &Table, key: &str) -> Result<u64> {
    let value = parent.get(key).and_then(Value::as_integer);
    Ok(u64::try_from(
        value.ok_or_else(|| format!("no number {key}"))?,
    )?)
}

fn choices(parent: &Table) -> Result<Vec<Choice>> {
    let mut all = Vec::new();
    for (name, value) in parent {
        let body = value.as_table().ok_or("a choice is a table")?;
        let mut items = Vec::new();
        for (item, value) in body.iter().filter(|(key, _)| *key != "doc") {
            let [Value::Integer(value), Value::String(doc)] =
                value.as_array().map_or(&[][..], |v| v)
            else {
                return Err(format!("{name}.{item} is not [number, meaning]").into());
            };
            let value = u32::try_from(*value)?.into();
            items.push(Item {
                name: item.clone(),
                value,
                doc: doc.clone(),
            });
        }
        items.sort_by_key(|item| item.value);
        if items.windows(2).any(|pair| pair[0].value == pair[1].value) {
            return Err(format!("{name} has a value twice").into());
        }
        all.push(Choice {
            name: name.clone(),
            doc: text(body, "doc")?,
            items,
        });
    }
    Ok(all)
}

fn fields(list: &[Value]) -> Result<Vec<Field>> {
    let mut all = Vec::new();
    for field in list {
        let parts: Vec<_> = field
            .as_array()
            .into_iter()
            .flatten()
            .map(Value::as_str)
            .collect();
        let [Some(name), Some(kind), Some(doc)] = parts[..] else {
            return Err(format!("{field} is not [name, type, meaning]").into());
        };
        let (kind, optional) = kind
            .strip_suffix('?')
            .map_or((kind, false), |kind| (kind, true));
        let (name, kind, doc) = (name.to_owned(), kind.to_owned(), doc.to_owned());
        all.push(Field {
            name,
            kind,
            optional,
            doc,
        });
    }
    Ok(all)
}

fn messages(root: &Table) -> Result<Vec<Message>> {
    let mut all = Vec::new();
    let mut kinds = BTreeSet::new();
    for message in array(root, "message")? {
        let message = message.as_table().ok_or("a message is a table")?;
        let kind = number(message, "kind")?;
        if kind == 0 || kind > u64::from(u16::MAX) || !kinds.insert(kind) {
            return Err(format!("kind {kind} is taken or out of range").into());
        }
        all.push(Message {
            name: text(message, "name")?,
            kind,
            up: match text(message, "direction")?.as_str() {
                "up" => true,
                "down" => false,
                other => return Err(format!("no direction {other}").into()),
            },
            doc: text(message, "doc")?,
            fields: fields(array(message, "fields")?)?,
        });
    }
    Ok(all)
}

// === writing Rust ===

fn pascal(name: &str) -> String {
    let mut out = String::new();
    for word in name.split('_') {
        let mut letters = word.chars();
        out.extend(letters.next().map(|first| first.to_ascii_uppercase()));
        out.push_str(letters.as_str());
    }
    out
}

fn doc(out: &mut String, indent: usize, text: &str) -> Result<()> {
    for line in text.lines() {
        // Ranges such as [0, n) are not links.
        let line = line.trim().replace('[', "\\[").replace(']', "\\]");
        writeln!(out, "{:indent$}/// {line}", "")?;
    }
    Ok(())
}

fn layout(
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

impl Types {
    fn rust(&self, field: &Field) -> Result<String> {
        let kind = field.kind.as_str();
        let name = match kind {
            "u32" | "u64" | "bool" => kind.to_owned(),
            "b16" => "[u8; 16]".into(),
            "b32" => "[u8; 32]".into(),
            "str" => "String".into(),
            "u32s" => "Vec<u32>".into(),
            "u64s" => "Vec<u64>".into(),
            _ if self.enums.contains(kind) && field.optional => format!("Option<layout::{kind}>"),
            _ if self.enums.contains(kind) || self.flags.contains(kind) => {
                format!("layout::{kind}")
            }
            other => return Err(format!("no type {other}").into()),
        };
        if field.optional && !self.enums.contains(kind) {
            return Err(format!("{kind}? is not a type").into());
        }
        Ok(name)
    }

    /// A call that appends the field to `out`.
    fn put(
        &self,
        Field {
            name,
            kind,
            optional,
            ..
        }: &Field,
    ) -> String {
        match kind.as_str() {
            "u32" | "u64" | "bool" => format!("put::{kind}(out, self.{name})"),
            "b16" | "b32" => format!("out.extend_from_slice(&self.{name})"),
            "str" | "u32s" | "u64s" => format!("put::{kind}(out, &self.{name})"),
            _ if *optional => {
                format!("put::u32(out, self.{name}.map_or(0, layout::{kind}::as_u32))")
            }
            _ => format!("put::u32(out, self.{name}.as_u32())"),
        }
    }

    /// An expression that takes the field from the cursor `body`.
    fn take(
        &self,
        Field {
            name,
            kind,
            optional,
            ..
        }: &Field,
    ) -> String {
        match kind.as_str() {
            "u32" | "u64" | "bool" | "str" | "u32s" | "u64s" => format!("body.{kind}(\"{name}\")?"),
            "b16" | "b32" => format!("body.raw(\"{name}\")?"),
            _ if *optional => format!("body.optional(\"{name}\", layout::{kind}::from_u32)?"),
            _ => format!("body.choice(\"{name}\", layout::{kind}::from_u32)?"),
        }
    }
}

/// A struct with `encode` and `decode` of its body.
fn structure(
    out: &mut String,
    name: &str,
    meaning: &str,
    fields: &[Field],
    types: &Types,
) -> Result<()> {
    // Inside `layout` the choices are in scope by name.
    let local = name.starts_with("Handshake");
    let strip = |code: String| {
        if local {
            code.replace("layout::", "")
        } else {
            code
        }
    };
    doc(out, 0, meaning)?;
    writeln!(
        out,
        "#[derive(Clone, Eq, PartialEq, Debug, Serialize, Deserialize)]\n\
         #[serde(deny_unknown_fields)]\npub struct {name} {{"
    )?;
    for field in fields {
        doc(out, 4, &field.doc)?;
        writeln!(
            out,
            "    pub {}: {},",
            field.name,
            strip(types.rust(field)?)
        )?;
    }
    writeln!(
        out,
        "}}\n\nimpl {name} {{\n    /// Appends the body's bytes."
    )?;
    writeln!(out, "    pub fn encode(&self, out: &mut Vec<u8>) {{")?;
    for field in fields {
        writeln!(out, "        {};", strip(types.put(field)))?;
    }
    writeln!(
        out,
        "    }}\n\n    /// Reads a whole body.\n    ///\n    /// # Errors\n    ///\n\
         \x20   /// If the bytes are not exactly one body.\n\
         \x20   pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {{\n\
         \x20       let mut body = Cursor::new(\"{name}\", body);\n        let this = Self {{"
    )?;
    for field in fields {
        writeln!(
            out,
            "            {}: {},",
            field.name,
            strip(types.take(field))
        )?;
    }
    writeln!(
        out,
        "        }};\n        body.end()?;\n        Ok(this)\n    }}\n}}\n"
    )?;
    Ok(())
}

fn message_module(out: &mut String, messages: &[Message], types: &Types) -> Result<()> {
    writeln!(out, "/// The messages of the channel.\npub mod msg {{")?;
    writeln!(out, "use serde::{{Deserialize, Serialize}};\n")?;
    writeln!(
        out,
        "use crate::proto::channel::codec::{{Cursor, DecodeError, Message, put}};"
    )?;
    writeln!(out, "use crate::proto::channel::layout;\n")?;
    for Message {
        name, doc, fields, ..
    } in messages
    {
        structure(out, name, doc, fields, types)?;
    }
    for (name, up, meaning) in [
        ("Up", true, "A message of the worker."),
        ("Down", false, "A message of the daemon."),
    ] {
        let mut own: Vec<_> = messages.iter().filter(|message| message.up == up).collect();
        own.sort_by_key(|message| message.kind);
        direction(out, name, meaning, &own)?;
    }
    strategies(out, messages, types)?;
    writeln!(out, "}}")?;
    Ok(())
}

/// The enum of one direction's messages.
fn direction(out: &mut String, name: &str, meaning: &str, messages: &[&Message]) -> Result<()> {
    writeln!(
        out,
        "/// {meaning}\n#[derive(Clone, Eq, PartialEq, Debug, Serialize, Deserialize)]"
    )?;
    writeln!(out, "pub enum {name} {{")?;
    for message in messages {
        doc(out, 4, &message.doc)?;
        writeln!(out, "    {0}({0}),", message.name)?;
    }
    writeln!(
        out,
        "}}\n\nimpl {name} {{\n    /// Kinds of all messages of this direction."
    )?;
    let kinds: Vec<_> = messages
        .iter()
        .map(|message| message.kind.to_string())
        .collect();
    writeln!(
        out,
        "    pub const KINDS: [u16; {}] = [{}];\n",
        kinds.len(),
        kinds.join(", ")
    )?;
    writeln!(out, "    /// The message's name, for logs and metrics.")?;
    writeln!(
        out,
        "    pub const fn name(&self) -> &'static str {{\n        match self {{"
    )?;
    for Message { name, .. } in messages {
        writeln!(out, "            Self::{name}(_) => \"{name}\",")?;
    }
    writeln!(out, "        }}\n    }}\n}}\n\nimpl Message for {name} {{")?;
    writeln!(out, "    fn kind(&self) -> u16 {{\n        match self {{")?;
    for Message { name, kind, .. } in messages {
        writeln!(out, "            Self::{name}(_) => {kind},")?;
    }
    writeln!(
        out,
        "        }}\n    }}\n\n    fn encode(&self, out: &mut Vec<u8>) {{"
    )?;
    writeln!(out, "        match self {{")?;
    for Message { name, .. } in messages {
        writeln!(
            out,
            "            Self::{name}(message) => message.encode(out),"
        )?;
    }
    writeln!(out, "        }}\n    }}\n")?;
    writeln!(
        out,
        "    fn decode(kind: u16, body: &[u8]) -> Result<Self, DecodeError> {{"
    )?;
    writeln!(out, "        Ok(match kind {{")?;
    for Message { name, kind, .. } in messages {
        writeln!(
            out,
            "            {kind} => Self::{name}({name}::decode(body)?),"
        )?;
    }
    writeln!(
        out,
        "            _ => return Err(DecodeError::Kind(kind)),\n        }})"
    )?;
    writeln!(out, "    }}\n}}\n")?;
    for Message { name: message, .. } in messages {
        writeln!(
            out,
            "impl From<{message}> for {name} {{\n    fn from(message: {message}) -> Self {{\n\
             \x20       Self::{message}(message)\n    }}\n}}\n"
        )?;
    }
    Ok(())
}

/// Arbitrary messages for property tests.
fn strategies(out: &mut String, messages: &[Message], types: &Types) -> Result<()> {
    writeln!(out, "#[cfg(test)]\npub(crate) mod strategy {{")?;
    writeln!(out, "use proptest::prelude::*;\n")?;
    writeln!(out, "use super::*;\n")?;
    for (name, up) in [("up", true), ("down", false)] {
        let direction = pascal(name);
        writeln!(
            out,
            "pub(crate) fn {name}() -> impl Strategy<Value = {direction}> {{"
        )?;
        writeln!(out, "    prop_oneof![")?;
        for Message { name, fields, .. } in messages.iter().filter(|message| message.up == up) {
            let names: Vec<_> = fields.iter().map(|field| field.name.as_str()).collect();
            let parts: Vec<_> = fields.iter().map(|field| types.strategy(field)).collect();
            writeln!(
                out,
                "        ({},).prop_map(|({},)| {direction}::from({name} {{ {} }})).boxed(),",
                parts.join(", "),
                names.join(", "),
                names.join(", ")
            )?;
        }
        writeln!(out, "    ]\n}}\n")?;
    }
    writeln!(out, "}}")?;
    Ok(())
}

impl Types {
    fn strategy(&self, Field { kind, optional, .. }: &Field) -> String {
        match kind.as_str() {
            "u32" | "u64" | "bool" => format!("any::<{kind}>()"),
            "b16" => "any::<[u8; 16]>()".into(),
            "b32" => "any::<[u8; 32]>()".into(),
            "str" => "\"\\\\PC{0,40}\"".into(),
            "u32s" => "prop::collection::vec(any::<u32>(), 0..200)".into(),
            "u64s" => "prop::collection::vec(any::<u64>(), 0..200)".into(),
            _ if self.flags.contains(kind) => {
                format!(
                    "any::<u32>().prop_map(|bits| layout::{kind}::from_u32(bits & layout::{kind}::ALL.as_u32()).expect(\"known flags\"))"
                )
            }
            _ if *optional => {
                format!("prop::option::of(prop::sample::select(layout::{kind}::ALL.to_vec()))")
            }
            _ => format!("prop::sample::select(layout::{kind}::ALL.to_vec())"),
        }
    }
}

//! The module `msg`: one struct for each message, and the enums over them.

use std::fmt::Write;

use super::{Field, Message, Result, Types, doc, pascal};

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
pub(super) fn structure(
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

pub(super) fn message_module(out: &mut String, messages: &[Message], types: &Types) -> Result<()> {
    writeln!(out, "/// The messages of the channel.\npub mod msg {{")?;
    writeln!(out, "use serde::{{Deserialize, Serialize}};\n")?;
    writeln!(
        out,
        "use crate::proto::channel::codec::{{Cursor, DecodeError, Message, put}};"
    )?;
    writeln!(out, "use crate::proto::channel::layout;\n")?;
    for Message {
        name,
        kind,
        doc,
        fields,
        ..
    } in messages
    {
        structure(out, name, doc, fields, types)?;
        writeln!(out, "impl {name} {{\n    /// Its kind in a record's head.")?;
        writeln!(out, "    pub const KIND: u16 = {kind};\n}}\n")?;
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
    for Message { name, .. } in messages {
        writeln!(out, "            Self::{name}(_) => {name}::KIND,")?;
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
    for Message { name, .. } in messages {
        writeln!(
            out,
            "            {name}::KIND => Self::{name}({name}::decode(body)?),"
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

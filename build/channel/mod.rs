//! Turns the description of the shared-memory channel into Rust.
//!
//! The result has two modules: `layout` (numbers, header, enums, flags, handshake) and `msg` (one
//! struct for each message, and the enums `Up` and `Down` over them). How a single field is written
//! and read is in `src/proto/channel/codec.rs`; here is only which fields follow each other.

mod layout;
mod messages;

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
    layout::layout(&mut out, &root, handshake, &enums, &flags, &types)?;
    messages::message_module(&mut out, &messages, &types)?;
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

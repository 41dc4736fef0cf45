//! A chat template: Jinja, as the models' own software renders it.

use minijinja::value::{Kwargs, Value as Item};
use minijinja::{Environment, Error, ErrorKind, context};
use serde_json::Value;

use super::{Chat, json};

/// The name of the one template.
const NAME: &str = "chat";
/// Steps of one rendering: messages are a client's, so what loops over them is bounded.
const FUEL: u64 = 50_000_000;
/// Largest template.
const SOURCE_MAX: usize = 1 << 20;

/// A template that was read.
pub(super) struct Template {
    environment: Environment<'static>,
    /// Names of special tokens, and their texts.
    special: Vec<(&'static str, String)>,
    /// It takes a message's content as a list of parts.
    parts: bool,
}

/// How a template goes through the parts of a content.
const LOOPS: [&str; 4] = [
    "in message.content",
    "in message['content']",
    "in message[\"content\"]",
    "in content",
];

// === impl Template ===

impl Template {
    pub(super) fn new(
        source: String,
        special: Vec<(&'static str, String)>,
    ) -> Result<Template, String> {
        if source.len() > SOURCE_MAX {
            return Err("the chat template is larger than 1 MiB".to_owned());
        }
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", refuse);
        environment.add_filter("tojson", to_json);
        let parts = LOOPS.iter().any(|text| source.contains(text));
        environment
            .add_template_owned(NAME, source)
            .map_err(|error| format!("the chat template: {error}"))?;
        Ok(Template {
            environment,
            special,
            parts,
        })
    }

    pub(super) fn render(&self, chat: &Chat<'_>) -> Result<String, String> {
        let Chat {
            messages,
            tools,
            generation,
            extra,
        } = *chat;
        let messages = messages.iter().map(|it| message(it, self.parts));
        let messages: Vec<Item> = messages.collect();
        let special = self.special.iter().map(|(name, text)| (*name, text));
        let special: Item = special
            .map(|(name, text)| (name, Item::from(text.clone())))
            .collect();
        let extra = extra.map_or(Item::from(()), Item::from_serialize);
        let known = context! {
            messages,
            tools => tools.map(Item::from_serialize),
            documents => (),
            add_generation_prompt => generation,
        };
        // What a request says wins over nothing that is known.
        let all = if extra.is_none() {
            context! { ..known, ..special }
        } else {
            context! { ..known, ..special, ..extra }
        };
        let template = self.environment.get_template(NAME);
        template
            .and_then(|template| template.render(all))
            .map_err(|error| error.detail().unwrap_or(&error.to_string()).to_owned())
    }
}

/// A message as SGLang gives it to a template: without what is null, parts of text as one text where
/// the template takes no parts, and the arguments of its tool calls as values, as clients send them as
/// text.
fn message(message: &Value, parts: bool) -> Item {
    let mut message = message.clone();
    if let Some(fields) = message.as_object_mut() {
        fields.retain(|_, value| !value.is_null());
    }
    if let Some(content) = message.get_mut("content")
        && let Some(list) = content.as_array().filter(|_| !parts)
    {
        let texts = list.iter().filter_map(|part| part.get("text")?.as_str());
        *content = texts.collect::<Vec<_>>().join(" ").into();
    }
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        if let Some(arguments) = call.pointer_mut("/function/arguments")
            && let Some(text) = arguments.as_str()
            && let Ok(value) = serde_json::from_str::<Value>(text)
        {
            *arguments = value;
        }
    }
    Item::from_serialize(&message)
}

fn refuse(text: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, text))
}

fn to_json(value: &Item, options: Kwargs) -> Result<Item, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Python's further options change nothing that templates ask for.
    let _ascii: Option<bool> = options.get("ensure_ascii")?;
    let _sort: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let text = json::dumps(value, indent)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error))?;
    Ok(Item::from_safe_string(text))
}

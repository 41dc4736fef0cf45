//! A model's own tokenizer and chat template, read from the files that come with the model.
//!
//! # What
//! A folder with `tokenizer.json`, and where the model chats `chat_template.jinja` or the
//! `chat_template` of `tokenizer_config.json`, which also names the special tokens.
//!
//! # Errors
//! Files that are missing, too large or malformed are an error at the start; a template that refuses
//! messages is an error of that request.

mod detokenizer;
mod json;
mod template;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

pub use detokenizer::Detokenizer;
use template::Template;

/// Largest file of a tokenizer.
const FILE_MAX: u64 = 128 << 20;

/// Turns text and messages into tokens and back.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    special: HashSet<u32>,
    template: Option<Template>,
    eos: Option<u32>,
}

/// Messages to be rendered.
#[derive(Clone, Copy, Debug)]
pub struct Chat<'a> {
    /// The messages, as an OpenAI client sends them.
    pub messages: &'a [Value],
    /// Its tools, if there are any.
    pub tools: Option<&'a Value>,
    /// Open the assistant's turn at the end.
    pub generation: bool,
    /// `chat_template_kwargs`: further variables of the template.
    pub extra: Option<&'a Map<String, Value>>,
}

/// Why there are no tokens or no text.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file cannot be read.
    #[error("{}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// A file is not what its name says.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The model has no chat template.
    #[error("the model has no chat template")]
    NoTemplate,
    /// The template refuses the messages.
    #[error("the chat template refuses the messages: {0}")]
    Template(String),
    /// The text or the tokens cannot be converted.
    #[error("{0}")]
    Convert(String),
}

// === impl Tokenizer ===

impl Tokenizer {
    /// Reads the files of a folder.
    ///
    /// # Errors
    /// `Read` and `Malformed`.
    pub fn load(folder: &Path) -> Result<Tokenizer, TokenizerError> {
        let path = folder.join("tokenizer.json");
        let bytes = read(&path)?.ok_or_else(|| TokenizerError::Read {
            path: path.clone(),
            error: std::io::ErrorKind::NotFound.into(),
        })?;
        let inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|error| malformed(&path, &error.to_string()))?;
        let config_path = folder.join("tokenizer_config.json");
        let config = match read(&config_path)? {
            Some(bytes) => serde_json::from_slice::<Map<String, Value>>(&bytes)
                .map_err(|error| malformed(&config_path, &error.to_string()))?,
            None => Map::new(),
        };
        let template_path = folder.join("chat_template.jinja");
        let source = match read(&template_path)? {
            Some(bytes) => Some((
                template_path.clone(),
                String::from_utf8(bytes).map_err(|_| malformed(&template_path, "not UTF-8"))?,
            )),
            None => template_of(&config).map(|source| (config_path, source)),
        };
        let template = source
            .map(|(path, source)| {
                Template::new(source, special_names(&config))
                    .map_err(|reason| malformed(&path, &reason))
            })
            .transpose()?;
        let added = inner.get_added_tokens_decoder();
        let special = added
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(id, _)| *id)
            .collect();
        let eos = name_of(&config, "eos_token").and_then(|name| inner.token_to_id(&name));
        Ok(Tokenizer {
            inner,
            special,
            template,
            eos,
        })
    }

    /// The tokens of a text. `special`: also those that the model puts around a prompt.
    ///
    /// # Errors
    /// `Convert`.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.inner.encode_fast(text, special);
        encoding
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| TokenizerError::Convert(error.to_string()))
    }

    /// The text of tokens, without special ones if they are to be skipped. Tokens that the
    /// vocabulary has not are left out.
    ///
    /// # Errors
    /// `Convert`.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        self.inner
            .decode(ids, skip_special)
            .map_err(|error| TokenizerError::Convert(error.to_string()))
    }

    /// The prompt of some messages, as text.
    ///
    /// # Errors
    /// `NoTemplate` and `Template`.
    pub fn render(&self, chat: &Chat<'_>) -> Result<String, TokenizerError> {
        let template = self.template.as_ref().ok_or(TokenizerError::NoTemplate)?;
        template.render(chat).map_err(TokenizerError::Template)
    }

    /// The prompt of some messages, as tokens.
    ///
    /// # Errors
    /// `NoTemplate`, `Template` and `Convert`.
    pub fn encode_chat(&self, chat: &Chat<'_>) -> Result<Vec<u32>, TokenizerError> {
        self.encode(&self.render(chat)?, false)
    }

    /// The token that ends an answer.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// It has a chat template.
    pub fn chats(&self) -> bool {
        self.template.is_some()
    }

    /// A token that is no text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Tokens in its vocabulary.
    pub fn len(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Its vocabulary is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("tokens", &self.len())
            .field("chats", &self.chats())
            .finish_non_exhaustive()
    }
}

/// The bytes of a file; `None` if there is no such file.
fn read(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    let failed = |error| TokenizerError::Read {
        path: path.into(),
        error,
    };
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut bytes = Vec::new();
    file.take(FILE_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > FILE_MAX {
        return Err(malformed(path, "larger than 128 MiB"));
    }
    Ok(Some(bytes))
}

fn malformed(path: &Path, reason: &str) -> TokenizerError {
    TokenizerError::Malformed {
        path: path.into(),
        reason: reason.to_owned(),
    }
}

/// The template in `tokenizer_config.json`: one, or the one called `default` among several.
fn template_of(config: &Map<String, Value>) -> Option<String> {
    match config.get("chat_template")? {
        Value::String(source) => Some(source.clone()),
        Value::Array(all) => all
            .iter()
            .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))
            .and_then(|entry| entry.get("template")?.as_str())
            .map(str::to_owned),
        _ => None,
    }
}

/// A special token's text, written as such or as an object.
fn name_of(config: &Map<String, Value>, key: &str) -> Option<String> {
    let value = config.get(key)?;
    let text = value.as_str().or_else(|| value.get("content")?.as_str());
    text.map(str::to_owned)
}

/// What templates know of special tokens.
fn special_names(config: &Map<String, Value>) -> Vec<(&'static str, String)> {
    ["bos_token", "eos_token", "unk_token", "pad_token"]
        .into_iter()
        .filter_map(|key| Some((key, name_of(config, key)?)))
        .collect()
}

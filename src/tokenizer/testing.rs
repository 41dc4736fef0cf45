//! A small real tokenizer for tests: byte-level BPE, trained on a few sentences, with a chat
//! template in ChatML.

use std::path::Path;

use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, TokenizerBuilder};

/// Tokens of the tokenizer: as many as the embedded engine's model has.
const VOCABULARY: usize = 2048;

/// ChatML, with the system message that many models add where there is none left out.
pub const CHATML: &str = "\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}\
{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% endif -%}
{%- if message.tool_calls %}{% for call in message.tool_calls %}\
{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}{% endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
";

/// Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into a folder that
/// exists.
///
/// # Errors
/// The folder cannot be written, or the tokenizer not be trained.
pub fn write(
    folder: &Path,
    template: &str,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let alphabet = ByteLevel::alphabet();
    let special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
    let special = special.map(|text| AddedToken::from(text, true));
    let mut trainer = BpeTrainerBuilder::new()
        .vocab_size(1024)
        .min_frequency(1)
        .show_progress(false)
        .initial_alphabet(alphabet.into_iter().collect())
        .special_tokens(special.to_vec())
        .build();
    let byte_level = ByteLevel::new(false, true, true);
    let mut tokenizer = TokenizerBuilder::new()
        .with_model(BPE::default())
        .with_normalizer(None::<tokenizers::NormalizerWrapper>)
        .with_pre_tokenizer(Some(byte_level))
        .with_post_processor(Some(byte_level))
        .with_decoder(Some(byte_level))
        .build()?;
    tokenizer.train(
        &mut trainer,
        SENTENCES.iter().map(|text| (*text).to_owned()),
    )?;
    // One token for each id of the embedded engine's model, so that every answer is text that
    // becomes the same tokens again.
    let known = tokenizer.get_vocab_size(true);
    let more = (known..VOCABULARY).map(|id| AddedToken::from(format!(" ~{id}~"), false));
    tokenizer.add_tokens(&more.collect::<Vec<_>>());
    tokenizer.save(folder.join("tokenizer.json"), false)?;
    let config = serde_json::json!({ "eos_token": "<|im_end|>", "bos_token": null });
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string())?;
    std::fs::write(folder.join("chat_template.jinja"), template)?;
    Ok(())
}

const SENTENCES: [&str; 8] = [
    "system user assistant tool the quick brown fox jumps over the lazy dog",
    "My favourite colour is blue and the number that I want you to remember is 42.",
    "What is the number that I told you to remember? What is my favourite colour?",
    "You are a helpful assistant, and your name is persona number seven of eight.",
    "A conversation goes on tomorrow where it ended today, with only the new words sent.",
    "The weather in Paris is sunny, the temperature is 21 degrees, the wind is light.",
    "Please answer in one sentence, and then say which turn of the conversation this is.",
    "{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}}",
];

//! A real tokenizer, made here.

use serde_json::json;

use super::testing::{CHATML, write};
use super::*;

fn made(template: &str) -> (tempfile::TempDir, Tokenizer) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), template).unwrap();
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    (folder, tokenizer)
}

fn chat(messages: &[Value], generation: bool) -> Chat<'_> {
    Chat {
        messages,
        tools: None,
        generation,
        extra: None,
    }
}

#[test]
fn text_becomes_tokens_and_text_again() {
    let (_folder, tokenizer) = made(CHATML);
    for text in [
        "",
        "the quick brown fox",
        "Grüße, 世界! 🦊\n\n  x",
        "<|im_end|>\n",
    ] {
        let ids = tokenizer.encode(text, false).unwrap();
        assert!(ids.iter().all(|id| (*id as usize) < tokenizer.len()));
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    }
    let eos = tokenizer.eos().unwrap();
    assert!(tokenizer.is_special(eos) && !tokenizer.is_special(300));
    assert_eq!(tokenizer.encode("<|im_end|>", false).unwrap(), [eos]);
    assert_eq!(tokenizer.decode(&[eos], true).unwrap(), "");
}

#[test]
fn messages_are_rendered() {
    let (_folder, tokenizer) = made(CHATML);
    let messages = [
        json!({ "role": "user", "content": " hi " }),
        json!({ "role": "assistant", "content": null, "tool_calls": [
            { "function": { "name": "f", "arguments": "{\"x\": [1, \"<\"]}" } },
        ] }),
    ];
    let text = tokenizer.render(&chat(&messages, true)).unwrap();
    assert_eq!(
        text,
        "<|im_start|>user\n hi <|im_end|>\n<|im_start|>assistant\n<tool_call>{\"arguments\": \
         {\"x\": [1, \"<\"]}, \"name\": \"f\"}</tool_call><|im_end|>\n<|im_start|>assistant\n"
    );
    let ids = tokenizer.encode_chat(&chat(&messages, true)).unwrap();
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
}

#[test]
fn templates_use_what_python_has() {
    let (_folder, tokenizer) = made(
        "{%- for m in messages %}{% if m.content.strip().startswith('/') %}\
         {{ raise_exception('no ' + m.content) }}{% endif %}\
         {{ m['content'].split(' ')[-1] }}{% endfor %}{{ name | default('-') }}",
    );
    let say = |text: &str| [json!({ "role": "user", "content": text })];
    let extra = json!({ "name": "x" });
    let messages = say("a b");
    let named = Chat {
        extra: extra.as_object(),
        ..chat(&messages, false)
    };
    assert_eq!(tokenizer.render(&named).unwrap(), "bx");
    assert_eq!(tokenizer.render(&chat(&messages, false)).unwrap(), "b-");
    let error = tokenizer.render(&chat(&say(" /etc"), false)).unwrap_err();
    assert!(error.to_string().ends_with("no  /etc"), "{error}");
}

#[test]
fn a_template_cannot_run_for_ever() {
    let (_folder, tokenizer) = made(
        "{%- for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}",
    );
    let error = tokenizer.render(&chat(&[], false)).unwrap_err();
    assert!(matches!(error, TokenizerError::Template(_)), "{error}");
}

#[test]
fn an_answer_is_the_same_text_piece_by_piece() {
    let (_folder, tokenizer) = made(CHATML);
    for text in ["the quick 🦊 jumps", "世界", "a<|im_end|>b"] {
        let ids = tokenizer.encode(text, false).unwrap();
        let mut pieces = Detokenizer::new(false);
        let mut all = String::new();
        for id in &ids {
            let piece = pieces.push(&tokenizer, *id);
            assert!(!piece.contains('\u{FFFD}'), "{piece:?}");
            all += &piece;
        }
        all += &pieces.finish(&tokenizer);
        assert_eq!(all, text);
    }
    // Half of a character is given at the end, and not before.
    let ids = tokenizer.encode("é", false).unwrap();
    let mut half = Detokenizer::new(false);
    assert_eq!(half.push(&tokenizer, ids[0]), "");
    assert_eq!(half.finish(&tokenizer), "\u{FFFD}");
}

#[test]
fn bad_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let load = || Tokenizer::load(folder.path()).unwrap_err();
    assert!(matches!(load(), TokenizerError::Read { .. }));
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    assert!(load().to_string().contains("tokenizer.json"));
    write(folder.path(), "{% if %}").unwrap();
    assert!(
        load().to_string().contains("chat_template.jinja"),
        "{}",
        load()
    );
    write(folder.path(), CHATML).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), "[").unwrap();
    assert!(load().to_string().contains("tokenizer_config.json"));
    std::fs::remove_file(folder.path().join("tokenizer_config.json")).unwrap();
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    assert!(!tokenizer.chats() && tokenizer.eos().is_none());
    let error = tokenizer.render(&chat(&[], true)).unwrap_err();
    assert!(matches!(error, TokenizerError::NoTemplate));
}

#[test]
fn parts_of_text_are_one_text_unless_the_template_takes_parts() {
    let message = |content: Value| [json!({ "role": "user", "content": content })];
    let parts = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]);
    let (_folder, tokenizer) = made(CHATML);
    let rendered = |content| tokenizer.render(&chat(&message(content), false)).unwrap();
    assert_eq!(rendered(parts.clone()), "<|im_start|>user\na b<|im_end|>\n");
    assert_eq!(rendered(Value::Null), "<|im_start|>user\n<|im_end|>\n");
    let loops = "{% for message in messages %}{% for part in message.content %}[{{ part.text }}]\
                 {% endfor %}{% endfor %}";
    let (_folder, tokenizer) = made(loops);
    let text = tokenizer.render(&chat(&message(parts), false));
    assert_eq!(text.unwrap(), "[a][b]");
}

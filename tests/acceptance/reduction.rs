//! Fewer tokens: 271 requests in eight conversations, against a client that sends everything each
//! time, and against a server whose device cache is never full.

use serde_json::{Value, json};

use crate::common::engine::{Engine, tokens};
use crate::stage::{EXACT, Stage, ids, number};

const REQUESTS: usize = 271;
const CONVERSATIONS: usize = 8;
const ANSWER: usize = 12;

#[test]
fn requests_in_conversations_send_and_prefill_only_what_is_new() {
    // Few states fit on the device: conversations push each other out, and come back.
    let mut stage = Stage::new(&["--slots", "7", "--max-running", "2"]);
    let unlimited = Engine::alone(&[&EXACT[..], &["--slots", "2000"]].concat());
    let mut transcripts = vec![tokens(0, 250); CONVERSATIONS];
    for (number, transcript) in (1..).zip(&mut transcripts) {
        transcript.extend(tokens(number, 50));
    }
    let (mut stateless, mut wire, mut prefilled) = (0, 0, 0);
    let (mut cached, mut best) = (0, 0);
    for request in 0..REQUESTS {
        // In no regular order, each of them often.
        let at = (request * request / 3 + request) % CONVERSATIONS;
        if request == REQUESTS / 2 {
            stage.keep(&format!("c{at}"));
            stage.restart_both();
        }
        let transcript = &mut transcripts[at];
        let begins = transcript.len() == 300;
        let new = match begins {
            true => transcript.clone(),
            false => {
                let new = tokens(10_000 + request as u64, 10 + request % 15);
                transcript.extend(&new);
                new
            }
        };
        let answer = stage.generate(&format!("c{at}"), &new, ANSWER);
        assert_eq!(number(&answer, "/usage/wire_tokens") as usize, new.len());
        assert_eq!(
            number(&answer, "/usage/prompt_tokens") as usize,
            transcript.len()
        );
        stateless += transcript.len() as u64;
        wire += number(&answer, "/usage/wire_tokens");
        prefilled += number(&answer, "/usage/prefilled_tokens");
        cached += number(&answer, "/usage/cached_tokens");
        let ideal = unlimited.generate(
            &format!("c{at}"),
            &format!("r{request}"),
            transcript,
            ANSWER,
        );
        best += ideal.cached;
        assert_eq!(ids(&answer), ideal.tokens, "request {request}");
        transcript.extend(ids(&answer));
    }
    let report: Value = json!({
        "requests": REQUESTS, "stateless_tokens": stateless, "wire_tokens": wire,
        "prefilled_tokens": prefilled, "cached_tokens": cached, "unlimited_cached_tokens": best,
        "wire_reduction": 1.0 - wire as f64 / stateless as f64,
        "prefill_reduction": 1.0 - prefilled as f64 / stateless as f64,
        "reuse_efficiency": cached as f64 / best as f64,
    });
    println!("{report}");
    assert!(report["wire_reduction"].as_f64() >= Some(0.94), "{report}");
    assert!(
        report["reuse_efficiency"].as_f64() >= Some(0.99),
        "{report}"
    );
    assert!(
        report["prefill_reduction"].as_f64() >= Some(0.9),
        "{report}"
    );
    stage.engine.check_accounts();
}

//! Every parser of bytes from outside, tried with what nobody would send.
//!
//! # What
//! Each layer lists its parsers (see `util::parser`); here each gets its own valid and hostile
//! inputs, those of the corpus in `tests/corpus`, valid ones that were damaged at random (bits, cuts,
//! splices, lengths at their extremes, checksums made right again), and random bytes. Whatever comes:
//! no panic, no more memory than the parser is allowed, and either an error or a value that is
//! written and read again as itself.
//!
//! # The corpus
//! `tests/corpus/README.md` tells how it is laid out and how to add to it.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};

use crate::device::meter::most_held;
use crate::util::parser::{BASE, Parser};
use crate::{config, pool, proto, rest, store, upstream};

/// Damaged inputs of each parser, and as many random ones.
const CASES: u32 = 400;

/// Inputs are not grown beyond this.
const LONGEST: usize = 64 << 10;

fn all() -> Vec<Parser> {
    let layers = [
        proto::parsers::parsers(),
        pool::parsers::parsers(),
        store::parsers::parsers(),
        rest::parsers::parsers(),
        upstream::parsers::parsers(),
        config::parsers::parsers(),
    ];
    let all: Vec<Parser> = layers.into_iter().flatten().collect();
    let names: BTreeSet<&str> = all.iter().map(|parser| parser.name).collect();
    assert_eq!(names.len(), all.len(), "each has a name of its own");
    all
}

/// Parses, and sees to what must hold for any input.
fn judge(parser: &Parser, input: &[u8]) -> Result<Result<Vec<u8>, String>, String> {
    let held = catch_unwind(AssertUnwindSafe(|| most_held(|| (parser.parse)(input))));
    let (taken, most) = held.map_err(|_| "it panicked")?;
    let allowed = BASE + parser.factor * input.len() as u64;
    if most > allowed {
        return Err(format!(
            "{most} bytes were held at once, {allowed} are allowed"
        ));
    }
    if let Ok(written) = &taken {
        if parser.exact && written != input {
            return Err(format!("it was written as {}", shown(written)));
        }
        match (parser.parse)(written) {
            Ok(again) if again == *written => {}
            Ok(again) => return Err(format!("{} then {}", shown(written), shown(&again))),
            Err(error) => return Err(format!("what was written is refused: {error}")),
        }
    }
    Ok(taken)
}

fn shown(bytes: &[u8]) -> String {
    let start = bytes.get(..200.min(bytes.len())).unwrap_or_default();
    format!("{} bytes, {}", bytes.len(), start.escape_ascii())
}

// === Given inputs ===

/// All that is wrong, at once.
fn none_wrong(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn valid_inputs_come_back() {
    let mut wrong = Vec::new();
    for parser in all() {
        let valid = (parser.valid)();
        assert!(!valid.is_empty(), "{}", parser.name);
        for (at, (name, bytes)) in valid.into_iter().enumerate() {
            let taken = judge(&parser, &bytes);
            // The first is as this program writes it.
            let right = if at == 0 {
                taken == Ok(Ok(bytes))
            } else {
                matches!(taken, Ok(Ok(_)))
            };
            if !right {
                let taken = taken.map(|taken| taken.map(|bytes| shown(&bytes)));
                wrong.push(format!("{} {name}: {taken:?}", parser.name));
            }
        }
    }
    none_wrong(&wrong);
}

#[test]
fn hostile_inputs_are_refused_with_a_reason() {
    let mut wrong = Vec::new();
    for parser in all() {
        let hostile = (parser.hostile)();
        assert!(!hostile.is_empty(), "{}", parser.name);
        for (name, bytes, why) in hostile {
            match judge(&parser, &bytes) {
                Ok(Err(said)) if said.contains(&why) => {}
                other => wrong.push(format!(
                    "{} {name}: {other:?}, and not {why:?}",
                    parser.name
                )),
            }
        }
    }
    none_wrong(&wrong);
}

#[test]
fn every_cut_of_a_valid_input_is_judged() {
    let mut wrong = Vec::new();
    for parser in all() {
        for (name, bytes) in (parser.valid)() {
            let step = bytes.len() / 512 + 1;
            for cut in (0..bytes.len()).step_by(step) {
                if let Err(error) = judge(&parser, &bytes[..cut]) {
                    wrong.push(format!("{} {name}, cut at {cut}: {error}", parser.name));
                }
            }
        }
    }
    none_wrong(&wrong);
}

// === The corpus ===

fn corpus() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "corpus"]
        .iter()
        .collect()
}

fn entries(parser: &Parser, kind: &str) -> Vec<(String, Vec<u8>)> {
    let folder = corpus().join(parser.name).join(kind);
    let listed =
        std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut found: Vec<_> = listed
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            (name, std::fs::read(entry.path()).unwrap())
        })
        .collect();
    found.sort();
    found
}

/// With `ENGRAM_CORPUS=write` it first adds what the table has and the corpus lacks.
#[test]
fn the_corpus_is_judged_as_its_folders_say() {
    let all = all();
    if std::env::var_os("ENGRAM_CORPUS").is_some_and(|value| value == "write") {
        write_corpus(&all);
    }
    let mut wrong = Vec::new();
    for parser in &all {
        for kind in ["valid", "hostile"] {
            let entries = entries(parser, kind);
            assert!(!entries.is_empty(), "{} has nothing {kind}", parser.name);
            for (name, bytes) in entries {
                match judge(parser, &bytes) {
                    Ok(taken) if taken.is_ok() == (kind == "valid") => {}
                    other => wrong.push(format!("{} {kind} {name}: {other:?}", parser.name)),
                }
            }
        }
    }
    none_wrong(&wrong);
    let known = all.iter().map(|parser| parser.name.to_owned());
    let known: BTreeSet<String> = known.chain(["README.md".to_owned()]).collect();
    let there = std::fs::read_dir(corpus()).unwrap();
    let there = there.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(
        there.collect::<BTreeSet<_>>(),
        known,
        "a folder for each parser, and no other"
    );
}

fn write_corpus(all: &[Parser]) {
    for parser in all {
        let hostile = (parser.hostile)()
            .into_iter()
            .map(|(name, bytes, _)| (name, bytes));
        for (kind, cases) in [("valid", (parser.valid)()), ("hostile", hostile.collect())] {
            let folder = corpus().join(parser.name).join(kind);
            std::fs::create_dir_all(&folder).unwrap();
            for (name, bytes) in cases {
                let path = folder.join(name);
                if bytes.len() <= LONGEST / 4 && !path.exists() {
                    std::fs::write(path, bytes).unwrap();
                }
            }
        }
    }
}

// === Damage ===

/// Something done to an input. Places are parts of its length.
#[derive(Clone, Debug)]
enum Damage {
    Flip(Index, u8),
    Set(Index, u8),
    Cut(Index),
    Remove(Index, Index),
    Repeat(Index, Index),
    /// Bytes of another valid input.
    Splice(Index, Index, Index, Index),
    Insert(Index, Vec<u8>),
    /// A word at a place that may be a length.
    Word(Index, usize, u64),
    /// A number in a text.
    Number(Index, &'static str),
}

const WORDS: [u64; 14] = [
    0,
    1,
    2,
    0x7f,
    0xff,
    0x100,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_fffe,
    0xffff_ffff,
    1 << 32,
    i64::MAX as u64,
    u64::MAX - 1,
    u64::MAX,
];

const NUMBERS: [&str; 12] = [
    "0",
    "-1",
    "1",
    "2147483648",
    "4294967295",
    "4294967296",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e999",
    "1.5",
    "null",
];

fn damage() -> impl Strategy<Value = Damage> {
    let at = any::<Index>;
    prop_oneof![
        3 => (at(), 0..8_u8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        2 => (at(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        1 => at().prop_map(Damage::Cut),
        1 => (at(), at()).prop_map(|(a, b)| Damage::Remove(a, b)),
        1 => (at(), at()).prop_map(|(a, b)| Damage::Repeat(a, b)),
        1 => (at(), at(), at(), at()).prop_map(|(a, b, c, d)| Damage::Splice(a, b, c, d)),
        1 => (at(), prop::collection::vec(any::<u8>(), 1..9)).prop_map(|(at, new)| Damage::Insert(at, new)),
        3 => (at(), prop::sample::select(vec![1, 2, 4, 8]), prop::sample::select(WORDS.to_vec()))
            .prop_map(|(at, width, word)| Damage::Word(at, width, word)),
        3 => (at(), prop::sample::select(NUMBERS.to_vec())).prop_map(|(at, number)| Damage::Number(at, number)),
    ]
}

/// Two places, in order.
fn between(a: Index, b: Index, len: usize) -> std::ops::Range<usize> {
    let (a, b) = (a.index(len + 1), b.index(len + 1));
    a.min(b)..a.max(b)
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>, others: &[Vec<u8>]) {
        let len = bytes.len();
        match self {
            Self::Flip(..) | Self::Set(..) if len == 0 => {}
            Self::Flip(at, bit) => bytes[at.index(len)] ^= 1 << bit,
            Self::Set(at, byte) => bytes[at.index(len)] = *byte,
            Self::Cut(at) => bytes.truncate(at.index(len + 1)),
            Self::Remove(a, b) => drop(bytes.drain(between(*a, *b, len))),
            Self::Repeat(a, b) => bytes.extend_from_within(between(*a, *b, len)),
            Self::Splice(at, which, a, b) => {
                let other = &others[which.index(others.len())];
                let new = other[between(*a, *b, other.len())].iter().copied();
                let at = at.index(len + 1);
                drop(bytes.splice(at..at, new));
            }
            Self::Insert(at, new) => {
                let at = at.index(len + 1);
                drop(bytes.splice(at..at, new.iter().copied()));
            }
            Self::Word(at, width, word) => {
                let at = at.index(len + 1);
                let room = bytes[at..].iter_mut().take(*width);
                room.zip(word.to_le_bytes())
                    .for_each(|(to, from)| *to = from);
            }
            Self::Number(at, number) => {
                let digits: Vec<usize> =
                    (0..len).filter(|at| bytes[*at].is_ascii_digit()).collect();
                if let Some(start) = (!digits.is_empty()).then(|| digits[at.index(digits.len())]) {
                    let end = bytes[start..]
                        .iter()
                        .take_while(|byte| byte.is_ascii_digit());
                    let end = start + end.count();
                    drop(bytes.splice(start..end, number.bytes()));
                }
            }
        }
        bytes.truncate(LONGEST);
    }
}

/// Runs `strategy` against a parser; a failure names the parser and the smallest input.
fn tries<S: Strategy>(
    parser: &Parser,
    strategy: S,
    make: impl Fn(S::Value) -> Vec<u8>,
) -> Option<String> {
    let config = Config {
        failure_persistence: None,
        ..Config::with_cases(CASES)
    };
    let mut runner = TestRunner::new(config);
    let run = runner.run(&strategy, |value| {
        let input = make(value);
        let judged = judge(parser, &input);
        prop_assert!(
            judged.is_ok(),
            "{} of {}",
            judged.unwrap_err(),
            shown(&input)
        );
        Ok(())
    });
    run.err().map(|error| format!("{}: {error}", parser.name))
}

#[test]
fn damaged_inputs_are_refused_or_come_back() {
    let mut wrong = Vec::new();
    for parser in all() {
        let hostile = (parser.hostile)().into_iter().map(|(_, bytes, _)| bytes);
        let valid = (parser.valid)().into_iter().map(|(_, bytes)| bytes);
        // Hostile ones are one step on the way to worse.
        let seeds: Vec<Vec<u8>> = valid.clone().chain(valid).chain(hostile).collect();
        let damages = prop::collection::vec(damage(), 1..4);
        wrong.extend(tries(
            &parser,
            (any::<Index>(), damages, any::<bool>()),
            |(seed, damages, seal)| {
                let mut bytes = seeds[seed.index(seeds.len())].clone();
                for damage in damages {
                    damage.apply(&mut bytes, &seeds);
                }
                if let Some(seal) = parser.seal.filter(|_| seal) {
                    seal(&mut bytes);
                }
                bytes
            },
        ));
    }
    none_wrong(&wrong);
}

#[test]
fn random_bytes_are_refused_or_come_back() {
    let mut wrong = Vec::new();
    for parser in all() {
        let byte = prop_oneof![2 => Just(0_u8), 1 => Just(0xff), 1 => b' '..0x7f, 3 => any::<u8>()];
        let bytes = prop::collection::vec(byte, 0..400);
        wrong.extend(tries(
            &parser,
            (bytes, any::<bool>()),
            |(mut bytes, seal)| {
                if let Some(seal) = parser.seal.filter(|_| seal) {
                    seal(&mut bytes);
                }
                bytes
            },
        ));
    }
    none_wrong(&wrong);
}

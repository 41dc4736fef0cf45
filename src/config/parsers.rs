//! The parser of the configuration. See `util::parser`.

use super::{Budget, Config};
use crate::util::parser::{Parser, Refused, case, refused, said};

/// All of them.
pub(crate) fn parsers() -> Vec<Parser> {
    vec![
        Parser {
            name: "config",
            parse: config,
            exact: false,
            seal: None,
            factor: 128,
            valid: || {
                let default = toml::to_string(&Config::default()).unwrap();
                vec![case("default", default)]
            },
            hostile: bad_configs,
        },
        Parser {
            name: "config-size",
            parse: |bytes| {
                let text = str::from_utf8(bytes).map_err(said)?;
                text.parse::<Budget>()
                    .map(|budget| budget.to_string().into_bytes())
            },
            exact: false,
            seal: None,
            factor: 16,
            valid: || {
                ["auto", "8.0 GiB", "0 B"]
                    .map(|text| case(text, text))
                    .to_vec()
            },
            hostile: || {
                let why = "neither";
                let bad = [
                    "",
                    "-1",
                    "8 XiB",
                    "99999999999999999999999999999 TiB x",
                    "auto ",
                    "0x10",
                    "nan",
                    "inf GiB",
                ];
                let cases = bad.iter().enumerate();
                cases
                    .map(|(n, bad)| refused(&format!("bad-{n}"), *bad, why))
                    .collect()
            },
        },
    ]
}

fn config(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let text = str::from_utf8(bytes).map_err(said)?;
    let config: Config = toml::from_str(text).map_err(said)?;
    config.validate().map_err(said)?;
    Ok(toml::to_string(&config).unwrap().into_bytes())
}

fn bad_configs() -> Vec<Refused> {
    vec![
        refused("no-toml", "[", ""),
        refused("no-utf8", [b'a', 0xff], "utf-8"),
        refused("misspelt-section", "[stor]\n", "stor"),
        refused("misspelt-key", "[store]\nrom = 1\n", "rom"),
        refused(
            "key-twice",
            "[store]\nram = \"1 GiB\"\nram = \"1 GiB\"\n",
            "duplicate",
        ),
        refused("wrong-type", "[store]\nram = true\n", "ram"),
        refused("deep", format!("a = {}", "[".repeat(5_000)), "recursion"),
        refused("deep-keys", format!("{}a = 1", "a.".repeat(5_000)), ""),
        refused(
            "number-beyond",
            "[service]\nread_threads = 99999999999999999999\n",
            "",
        ),
        refused("negative", "[service]\nread_threads = -1\n", ""),
    ]
}

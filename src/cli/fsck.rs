//! `engram fsck`.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use bytesize::ByteSize;

use super::table::{Table, plain, size};
use super::teller::Teller;
use crate::store::StoreError;
use crate::store::fsck::{self, Class, Finding, Options, Progress, Report};
use crate::util::clock::SystemClock;

const HELP: &str = "\
Without --repair nothing is changed. With it, damage moves to DIR/quarantine with its reason; what a
killed writer left, and objects that no good manifest names, are removed; what is sound is never
touched. Both can be killed and run again at any time.

Exit codes:
  0  no damage (leftovers of a killed daemon are none: its next start removes them)
  1  something was repaired, and no damage is left
  2  wrong usage
  4  damage is left
  8  not checked: a daemon uses DIR, it is no data directory, or the system refused";

/// Check a data directory that no daemon uses: manifests, objects and their checksums, tokens,
/// references, conversations.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// The data directory: `store.disk.path` of the daemon.
    #[arg(value_name = "DIR")]
    path: PathBuf,
    /// Repair what is found.
    #[arg(long)]
    repair: bool,
    /// Leave out the checksums of states and KV: reads little, misses flipped bytes in them.
    #[arg(long)]
    fast: bool,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    /// Threads that read. [default: one for each CPU, at most 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: Option<u16>,
    /// Most bytes of bad files that --repair keeps in quarantine; the oldest go first.
    #[arg(long, value_name = "SIZE", default_value = "1 GiB")]
    quarantine: ByteSize,
}

const REPAIRED: u8 = 1;
const DAMAGED: u8 = 4;
const FAILED: u8 = 8;

/// Findings of one class that are listed for people.
const LISTED: usize = 50;

/// Checks, and says what was found.
pub fn run(args: Args) -> ExitCode {
    let Args {
        path,
        repair,
        fast,
        json,
        threads,
        quarantine,
    } = args;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let options = Options {
        path,
        repair,
        fast,
        threads: threads.map_or(cpus.min(8), usize::from),
        quarantine: quarantine.as_u64(),
    };
    let teller = Teller::new();
    let checked = fsck::check(&options, &SystemClock::new(), &|progress| {
        teller.tell(|| how_far(progress))
    });
    teller.done();
    let report = match checked {
        Ok(report) => report,
        Err(error) => {
            eprintln!("engram: {}", told(&error));
            return ExitCode::from(FAILED);
        }
    };
    let text = match json {
        true => format!("{}\n", as_json(&report)),
        false => show(&report),
    };
    if let Err(error) = std::io::stdout().write_all(text.as_bytes())
        && error.kind() != std::io::ErrorKind::BrokenPipe
    {
        eprintln!("engram: {error}");
        return ExitCode::from(FAILED);
    }
    ExitCode::from(code(&report))
}

fn code(report: &Report) -> u8 {
    match (report.left(), report.repaired()) {
        (0, 0) => 0,
        (0, _) => REPAIRED,
        _ => DAMAGED,
    }
}

fn told(error: &StoreError) -> String {
    match error {
        StoreError::Locked { .. } => format!("{error}; stop it first"),
        _ => error.to_string(),
    }
}

fn as_json(report: &Report) -> serde_json::Value {
    let mut json = serde_json::to_value(report).unwrap_or_default();
    if let Some(fields) = json.as_object_mut() {
        fields.insert("format_version".into(), 1.into());
        fields.insert("exit_code".into(), code(report).into());
        fields.insert("damage_left".into(), report.left().into());
        fields.insert("repaired".into(), report.repaired().into());
    }
    json
}

fn show(report: &Report) -> String {
    let mut out = String::new();
    let mut table = Table::new(&[
        "MODEL",
        "NAME",
        ">SNAPSHOTS",
        ">OBJECTS",
        ">NAMESPACES",
        ">SIZE",
    ]);
    for model in &report.models {
        let name = ["display_name", "name", "model", "architecture"]
            .iter()
            .find_map(|key| model.description.get(*key).filter(|text| !text.is_empty()));
        let folder = model.folder.rsplit('/').next().unwrap_or_default();
        table.row([
            plain(folder),
            name.map_or("-".into(), |name| plain(name)),
            model.snapshots.to_string(),
            model.objects.to_string(),
            model.namespaces.len().to_string(),
            size(model.bytes),
        ]);
    }
    out.push_str(&table.render());
    let space = &report.space;
    line(
        &mut out,
        format_args!(
            "{} snapshots, {} objects, {} conversations, {} tokens; {} on disk ({} objects, {} \
             records, {} rebuilt at will, {} quarantine, {} other, {} folders)",
            report.snapshots,
            report.objects,
            report.conversations,
            report.tokens,
            size(space.total()),
            size(space.objects),
            size(space.records),
            size(space.derived),
            size(space.quarantine),
            size(space.other),
            size(space.folders),
        ),
    );
    let read = match report.fast {
        true => "checksums of states and KV left out".to_owned(),
        false => format!("{} verified by checksum", size(report.verified_bytes)),
    };
    line(&mut out, format_args!("{read}, {:.1} s", report.seconds));
    for class in [Class::Damage, Class::Leftover, Class::Note] {
        list(&mut out, report, class);
    }
    let count = |class| report.of(class).count();
    let end = match (count(Class::Damage), report.left(), report.repaired()) {
        (0, _, 0) if count(Class::Leftover) == 0 => "Clean.".to_owned(),
        (0, _, 0) => "No damage; the leftovers go at the next start, or with --repair.".to_owned(),
        (_, 0, repaired) => format!("Repaired: {repaired} files dealt with, no damage is left."),
        (_, left, _) if report.repair => format!("Damage is left: {left} files."),
        (_, left, _) => format!("Damage: {left} files. --repair puts them aside."),
    };
    line(&mut out, format_args!("{end}"));
    out
}

fn list(out: &mut String, report: &Report, class: Class) {
    let head = match class {
        Class::Damage => "damage",
        Class::Leftover => "leftovers",
        Class::Note => "notes",
    };
    let count = report.of(class).count();
    if count > 0 {
        line(out, format_args!("{head}:"));
    }
    for finding in report.of(class).take(LISTED) {
        let Finding {
            class: _,
            path,
            reason,
            detail,
            snapshot,
            repaired,
        } = finding;
        let reason = reason.map_or(String::new(), |reason| format!("{reason}: "));
        let lost = match snapshot {
            Some(_) => ", a snapshot is lost",
            None => "",
        };
        let repaired = match (repaired, class) {
            (false, _) => "",
            (true, Class::Damage) => " [put aside]",
            (true, _) => " [removed]",
        };
        let (path, detail) = (plain(path), plain(detail));
        line(
            out,
            format_args!("  {path}: {reason}{detail}{lost}{repaired}"),
        );
    }
    if count > LISTED {
        line(
            out,
            format_args!("  ({} more: --json lists all)", count - LISTED),
        );
    }
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(out, "{text}").expect("a String takes any text");
}

fn how_far(progress: Progress) -> String {
    let Progress {
        phase,
        done,
        total,
        bytes,
    } = progress;
    let read = match bytes {
        0 => String::new(),
        bytes => format!(", {} read", size(bytes)),
    };
    format!("{phase}: {done} of {total}{read}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(class: Class, repaired: bool) -> Finding {
        Finding {
            class,
            path: "models/x\n".into(),
            reason: Some("checksum"),
            detail: "chunk 1 of 2".into(),
            snapshot: None,
            repaired,
        }
    }

    /// Findings and whether they are repaired, the exit code, and how the last line begins.
    type Case = (&'static [(Class, bool)], u8, &'static str);

    #[test]
    fn codes_and_last_lines_agree() {
        let report = |findings: &[(Class, bool)]| Report {
            findings: findings.iter().map(|(c, r)| finding(*c, *r)).collect(),
            ..Report::default()
        };
        let cases: [Case; 6] = [
            (&[], 0, "Clean."),
            (&[(Class::Note, false)], 0, "Clean."),
            (&[(Class::Leftover, false)], 0, "No damage; "),
            (&[(Class::Leftover, true)], 1, "Repaired: 1 "),
            (
                &[(Class::Damage, true), (Class::Leftover, true)],
                1,
                "Repaired: 2 ",
            ),
            (
                &[(Class::Damage, true), (Class::Damage, false)],
                4,
                "Damage: 1 ",
            ),
        ];
        for (findings, expected, end) in cases {
            let report = report(findings);
            assert_eq!(code(&report), expected, "{findings:?}");
            let text = show(&report);
            let last = text.lines().last().unwrap();
            assert!(last.starts_with(end), "{findings:?}: {last}");
            assert_eq!(as_json(&report)["exit_code"], expected);
        }
    }

    #[test]
    fn long_lists_are_cut_and_names_are_harmless() {
        let report = Report {
            findings: vec![finding(Class::Damage, false); LISTED + 3],
            ..Report::default()
        };
        let text = show(&report);
        assert!(text.contains("(3 more: --json lists all)"), "{text}");
        assert!(
            text.contains("models/x\\n: checksum: chunk 1 of 2\n"),
            "{text}"
        );
    }
}

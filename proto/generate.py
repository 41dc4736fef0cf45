#!/usr/bin/env python3
"""Makes the committed Python code of the protocol, and the golden messages that both languages test.

    python proto/generate.py            writes
    python proto/generate.py --check    fails if what is committed differs

Needs Python 3.11 and what python-shim/requirements-gen.txt pins. From proto/engram/v1:

    engram.proto  -> python-shim/src/engram_sglang/_pb/engram/v1/
    channel.toml  -> python-shim/src/engram_sglang/_channel_layout.py
                     proto/engram/v1/golden.json
"""

import argparse
import difflib
import hashlib
import json
import pathlib
import struct
import sys
import tempfile
import textwrap
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
DESCRIPTIONS = ROOT / "proto/engram/v1"
PACKAGE = "python-shim/src/engram_sglang"
GENERATOR = "1.66.2"

# Base types of fixed size: struct code, Python type.
FIXED = {"u32": ("I", "int"), "u64": ("Q", "int"), "b16": ("16s", "bytes"), "b32": ("32s", "bytes")}
LISTS = {"u32s": "I", "u64s": "Q"}


class Field:
    """A field of a message: `base` is a base type, or the name of an enum or of flags."""

    def __init__(self, name: str, kind: str, doc: str) -> None:
        self.name, self.doc = name, doc
        self.base, self.optional = kind.removesuffix("?"), kind.endswith("?")

    @property
    def code(self) -> str | None:
        """Its struct code, or None if its size varies."""
        if self.base == "str" or self.base in LISTS:
            return None
        return FIXED[self.base][0] if self.base in FIXED else "I"

    @property
    def annotation(self) -> str:
        if self.base in FIXED:
            return FIXED[self.base][1]
        if self.base in LISTS:
            return "Sequence[int]"
        return {"str": "str", "bool": "bool"}.get(self.base, self.base + " | None" * self.optional)


def fields(rows: list) -> list[Field]:
    return [Field(*row) for row in rows]


def choice_items(body: dict) -> list[tuple[str, int, str]]:
    """(name, number, meaning), by number."""
    items = [(name, *row) for name, row in body.items() if name != "doc"]
    return sorted(items, key=lambda item: item[1])


# --- _channel_layout.py -----------------------------------------------------------------------------


def doc_lines(text: str, indent: int) -> list[str]:
    pad = " " * indent
    lines = textwrap.wrap(" ".join(text.split()), 96 - indent, break_long_words=False)
    if len(lines) == 1:
        return [f'{pad}"""{lines[0]}"""']
    return [f'{pad}"""{lines[0]}', *(pad + line for line in lines[1:]), f'{pad}"""']


def comment(text: str, indent: int) -> list[str]:
    pad = " " * indent + "# "
    return [pad + line for line in textwrap.wrap(" ".join(text.split()), 96 - len(pad))]


def segments(message: list[Field]) -> list[list[Field]]:
    """Runs of fields of fixed size, and single fields of varying size."""
    runs: list[list[Field]] = []
    for field in message:
        if field.code and runs and runs[-1][0].code:
            runs[-1].append(field)
        else:
            runs.append([field])
    return runs


def encoded(field: Field) -> str:
    """The expression that struct.pack takes for a field of fixed size."""
    value = f"self.{field.name}"
    if field.base in ("b16", "b32"):
        return f"raw({value}, {field.base[1:]})"
    return f"{value} or 0" if field.optional else value


def converted(field: Field) -> str:
    """The expression that makes the field's value of what struct.unpack gave."""
    if field.base in FIXED:
        return field.name
    call = {True: "optional", False: "choice"}[field.optional]
    kind = "bool_" if field.base == "bool" else field.base
    return f'body.{call}("{field.name}", {kind}, {field.name})'


def message_class(name: str, doc: str, kind: int | None, rows: list) -> list[str]:
    message = fields(rows)
    runs = segments(message)
    out, structs = [], {}
    for number, run in enumerate(runs):
        if run[0].code:
            structs[number] = f"_{name.upper()}_{number}"
            code = "".join(field.code or "" for field in run)
            out.append(f'{structs[number]} = struct.Struct("<{code}")')
    out += ["", "", f"class {name}(NamedTuple):", *doc_lines(doc, 4), ""]
    for field in message:
        out += [*comment(field.doc, 4), f"    {field.name}: {field.annotation}"]
    if kind is not None:
        out += ["", f"    KIND = {kind}  # type: ignore[misc]"]
    out += ["", "    def encode(self) -> bytes:", '        """The body\'s bytes."""']
    parts = []
    for number, run in enumerate(runs):
        if number in structs:
            values = "".join(f"\n            {encoded(field)}," for field in run)
            parts.append(f"{structs[number]}.pack({values}\n        )")
        else:
            parts.append(f"put_{run[0].base}(self.{run[0].name})")
    out += ["        return " + parts[0]] if len(parts) == 1 else [
        "        return (",
        *("            " + ("+ " if n else "") + part.replace("\n", "\n    ") for n, part in enumerate(parts)),
        "        )",
    ]
    out += ["", "    @classmethod", f"    def decode(cls, data: bytes) -> {name}:"]
    out += ['        """Reads a whole body, or raises DecodeError."""']
    out += [f'        body = Cursor("{name}", data)']
    for number, run in enumerate(runs):
        if number in structs:
            names = ", ".join(field.name for field in run)
            out.append(f'        ({names},) = body.fixed("{run[0].name}", {structs[number]})')
        else:
            out.append(f'        {run[0].name} = body.{run[0].base}("{run[0].name}")')
    out.append("        body.end()")
    out.append("        return cls(")
    out += [f"            {converted(field) if field.code else field.name}," for field in message]
    out += ["        )", "", ""]
    return out


def channel_layout(description: dict) -> str:
    out = [
        '"""Numbers and messages of the shared-memory channel.',
        "",
        "Generated from channel.toml by proto/generate.py. Not for editing.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "import enum",
        "import struct",
        "from collections.abc import Sequence",
        "from typing import NamedTuple, Union",
        "",
        "from ._codec import Cursor, bool_, put_str, put_u32s, put_u64s, raw",
        "",
    ]
    for name, value in description.items():
        if isinstance(value, int):
            out.append(f"{name.upper()} = {value:#x}" if name == "magic" else f"{name.upper()} = {value}")
    out += ["", "# Offsets in the header."]
    for name, word in sorted(description["header"].items(), key=lambda item: item[1]["offset"]):
        out += [*comment(f"{word['type']}: {word['doc']}", 0), f"HEADER_{name.upper()} = {word['offset']}"]
    out += ["", "# The socket for descriptors."]
    for name, value in description["handshake"].items():
        if isinstance(value, int):
            out.append(f"HANDSHAKE_{name.upper()} = {value:#x}" if name == "magic" else f"HANDSHAKE_{name.upper()} = {value}")
    out += ["", ""]
    for kind, base in (("enums", "IntEnum"), ("flags", "IntFlag")):
        for name, body in sorted(description[kind].items()):
            out += [f"class {name}(enum.{base}):", *doc_lines(body["doc"], 4), ""]
            for item, value, doc in choice_items(body):
                out += [*comment(doc, 4), f"    {item.upper()} = {value}"]
            out += ["", ""]
    for name, key, doc in (
        ("HandshakeRequest", "request", "What the worker says on the socket for descriptors."),
        ("HandshakeReply", "reply", "What the daemon answers there."),
    ):
        out += message_class(name, doc, None, description["handshake"][key])
    for message in description["message"]:
        out += message_class(message["name"], message["doc"], message["kind"], message["fields"])
    for direction, doc in (("up", "Messages of the worker, by kind."), ("down", "Messages of the daemon, by kind.")):
        names = [m["name"] for m in sorted(description["message"], key=lambda m: m["kind"]) if m["direction"] == direction]
        out += [f"{direction.capitalize()} = Union[", *(f"    {name}," for name in names), "]", ""]
        out += [f"# {doc}", f"{direction.upper()} = {{"]
        out += [f"    {name}.KIND: {name}," for name in names] + ["}", ""]
    return "\n".join(out).rstrip() + "\n"


# --- golden.json ------------------------------------------------------------------------------------


class Samples:
    """Values of fields: the least, the most, and something in between, the same at every run."""

    def __init__(self, description: dict) -> None:
        self.enums = {name: choice_items(body) for name, body in description["enums"].items()}
        self.flags = {name: choice_items(body) for name, body in description["flags"].items()}

    def value(self, message: str, field: Field, variant: str):
        base = field.base
        seed = hashlib.sha256(f"{message}.{field.name}".encode()).digest()
        number = int.from_bytes(seed[:8], "little")
        least, most = variant == "least", variant == "most"
        if base in ("u32", "u64"):
            top = 2 ** int(base[1:]) - 1
            return 0 if least else top if most else number & top
        if base in ("b16", "b32"):
            size = int(base[1:])
            return [0] * size if least else [255] * size if most else list(seed[:size])
        if base == "str":
            return "" if least else "\0ü€😀\u200b" * 9 if most else f"{field.name}-{number:x}"
        if base in LISTS:
            top = 2 ** int(base[1:-1]) - 1
            return [] if least else [0, 1, top] if most else [number >> n & top for n in range(7)]
        if base == "bool":
            return not least
        if base in self.flags:
            bits = [value for _, value, _ in self.flags[base]]
            return 0 if least else sum(bits) if most else sum(bits[::2])
        names = [name for name, _, _ in self.enums[base]]
        if least:
            return None if field.optional else names[0]
        return names[-1] if most else names[number % len(names)]

    def encode(self, field: Field, value) -> bytes:
        base = field.base
        if base in ("b16", "b32"):
            return bytes(value)
        if base == "str":
            data = value.encode()
            return struct.pack("<I", len(data)) + data
        if base in LISTS:
            return struct.pack(f"<I{len(value)}{LISTS[base]}", len(value), *value)
        if base in self.enums:
            numbers = {name: number for name, number, _ in self.enums[base]}
            value = 0 if value is None else numbers[value]
        return struct.pack("<Q" if base == "u64" else "<I", value)


def golden(description: dict) -> str:
    samples = Samples(description)
    messages = [
        ("HandshakeRequest", None, "handshake", description["handshake"]["request"]),
        ("HandshakeReply", None, "handshake", description["handshake"]["reply"]),
        *((m["name"], m["kind"], m["direction"], m["fields"]) for m in description["message"]),
    ]
    rows = []
    for name, kind, direction, message in messages:
        for variant in ("least", "plain", "most"):
            values = {f.name: samples.value(name, f, variant) for f in fields(message)}
            body = b"".join(samples.encode(f, values[f.name]) for f in fields(message))
            rows.append({"message": name, "kind": kind, "direction": direction, "fields": values, "body": body.hex()})
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


# --- _pb --------------------------------------------------------------------------------------------


def protobuf() -> dict[str, str]:
    """The generated gRPC code, by path. It imports itself as a part of engram_sglang."""
    from importlib.metadata import version

    import grpc_tools
    from grpc_tools import protoc

    if version("grpcio-tools") != GENERATOR:
        sys.exit(f"generate.py: needs grpcio-tools {GENERATOR}, not {version('grpcio-tools')}")
    virtual = "engram_sglang/_pb/engram/v1"
    with tempfile.TemporaryDirectory() as directory:
        code = protoc.main([
            "protoc",
            f"--proto_path={virtual}={DESCRIPTIONS}",
            f"--proto_path={pathlib.Path(grpc_tools.__file__).parent / '_proto'}",
            f"--python_out={directory}",
            f"--pyi_out={directory}",
            f"--grpc_python_out={directory}",
            f"{virtual}/engram.proto",
        ])
        if code != 0:
            sys.exit(code)
        made = sorted(pathlib.Path(directory, virtual).iterdir())
        files = {f"{PACKAGE}/_pb/engram/v1/{path.name}": path.read_text() for path in made}
    doc = '"""Generated from engram.proto by proto/generate.py. Not for editing."""\n'
    for package in ("_pb", "_pb/engram", "_pb/engram/v1"):
        files[f"{PACKAGE}/{package}/__init__.py"] = doc
    return files


# --- main -------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    check = parser.parse_args().check

    description = tomllib.loads((DESCRIPTIONS / "channel.toml").read_text())
    files = protobuf()
    files[f"{PACKAGE}/_channel_layout.py"] = channel_layout(description)
    files["proto/engram/v1/golden.json"] = golden(description)

    pb = ROOT / PACKAGE / "_pb"
    extra = [p for p in pb.rglob("*") if p.is_file() and str(p.relative_to(ROOT)) not in files]
    stale = [path for path in extra if path.suffix in (".py", ".pyi")]
    different = 0
    for name, text in sorted(files.items()):
        path = ROOT / name
        old = path.read_text() if path.is_file() else ""
        if old == text:
            continue
        different += 1
        if check:
            diff = difflib.unified_diff(old.splitlines(), text.splitlines(), name, "generated", lineterm="", n=1)
            print("\n".join(line[:200] for line in list(diff)[:40]))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {name}")
    for path in stale:
        different += 1
        print(f"{'not generated' if check else 'removed'}: {path.relative_to(ROOT)}")
        if not check:
            path.unlink()
    if check and different:
        print(f"{different} files differ: run proto/generate.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

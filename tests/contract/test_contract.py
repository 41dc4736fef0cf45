"""Every endpoint keeps what the OpenAPI document promises, whatever it is sent.

Requests are made from the document: good ones, and ones that break it. Half of them name what is there. No
answer may be a fault of the daemon, every error is typed, and every answer is of a status, a media type and a
schema that the document has. Seed and number of examples are fixed: a failure comes again.
"""

from __future__ import annotations

import collections
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import hypothesis
import pytest
import requests
import schemathesis
from client_stage import Stage
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = int(os.environ.get("ENGRAM_CONTRACT_EXAMPLES", "12"))
"""Requests of each kind to each endpoint."""
SEED = 20250131
TIMEOUT_S = 30

ALLOWED = {501, 503, 507}
"""Answers from 500 on that say something of the request or of what the daemon has room for."""
FROM_UPSTREAM = {500, 502, 504}
"""Where the inference server answers, or cannot."""

CHECKS = [
    status_code_conformance, content_type_conformance, response_headers_conformance, response_schema_conformance,
]
BYTES = {"POST /v1/import", "POST /v1/import/check"}
"""Their bodies are files, which no schema describes; other tests send good ones."""
ENDLESS = "/v1/events"
"""Its good answer never ends."""


class World:
    """What is there to be named."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.seen: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
        self.made = 0
        self.budgets = {
            f"{row['tier']}_budget_bytes": row["budget_bytes"] for row in stage.get("/v1/tiers")["tiers"]
        }
        self.renew()

    def post(self, path: str, body: Any, method: str = "POST") -> Any:
        answer = requests.request(method, self.stage.url + path, json=body, timeout=TIMEOUT_S)
        assert answer.ok, (path, answer.status_code, answer.text)
        return answer.json()

    def renew(self) -> None:
        """A conversation of two turns and a branch, and budgets as they were."""
        self.post("/v1/tiers", {**self.budgets, "disk_min_free_bytes": 1 << 20}, "PATCH")
        self.made += 1
        self.conversation = f"contract {self.made}/ä"
        for at in range(2):
            order = {"input_ids": list(range(100 + at, 140 + at)), "sampling_params": {"max_new_tokens": 4}}
            self.post("/v1/generate", {"conversation_id": self.conversation, **order})
        named = {"conversation_id": self.conversation}
        saved = self.post("/save_snapshot", {**named, "branch_name": "kept"})
        self.snapshot = saved["snapshot_id"]
        self.rid = saved["rid"]

    def name(self, values: Any, draw: Callable[[Any], Any], *, in_path: bool = False) -> None:
        """Puts what is there in the place of some made up names."""
        known = {
            "conversation_id": self.conversation, "snapshot_id": self.snapshot, "turn_number": 2, "turn": 1,
            "branch_name": "kept", "branch": "kept", "rid": self.rid, "with": self.conversation, "a": "1", "b": "kept",
        }
        if isinstance(values, dict):
            for key in sorted(known.keys() & values.keys()):
                if draw(st.booleans()):
                    values[key] = quote(str(known[key]), safe="") if in_path else known[key]
            if "max_new_tokens" in values:
                values["max_new_tokens"] = 4


@pytest.fixture(scope="module")
def world(stage: Stage) -> World:
    return World(stage)


def operations(world: World) -> Iterator[Any]:
    schema = schemathesis.openapi.from_url(f"{world.stage.url}/openapi.json")
    for found in schema.get_all_operations():
        yield found.ok()


def send(world: World, case: Any) -> None:
    """Sends a request, and compares the answer with the document."""
    session = requests.Session()
    path = case.operation.path
    if path != ENDLESS:
        response = case.call(session=session, timeout=TIMEOUT_S)
        world.seen[case.operation.label][response.status_code] += 1
        check(case, response)
        return
    sent = case.as_transport_kwargs()
    with session.request(**sent, stream=True, timeout=TIMEOUT_S) as response:
        world.seen[case.operation.label][response.status_code] += 1
        if response.status_code == 200:
            assert response.headers["content-type"] == "text/event-stream"
            return
        case.validate_response(response, checks=CHECKS)


def check(case: Any, response: Any) -> None:
    status = response.status_code
    tags = case.operation.definition.raw.get("tags", [])
    allowed = ALLOWED | (FROM_UPSTREAM if {"passed", "generate"} & set(tags) else set())
    if status >= 500 and status not in allowed:
        case.validate_response(response, checks=[not_a_server_error])
    case.validate_response(response, checks=CHECKS)
    if status >= 400 and not {"passed", "generate"} & set(tags):
        body = response.json()
        assert body["success"] is False and body["error"]["type"], body


def test_every_endpoint_keeps_its_contract(world: World, subtests: pytest.Subtests) -> None:
    for operation in operations(world):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            with subtests.test(f"{operation.label} {mode.value}"):
                attack(world, operation, mode)
        world.renew()
    # Examples that were all refused would prove little.
    for operation in operations(world):
        with subtests.test(f"{operation.label} good"):
            known = {"conversation_id": world.conversation, "snapshot_id": world.snapshot,
                     "turn_number": "2", "branch_name": "kept"}
            names = {it["name"] for it in operation.definition.raw.get("parameters", []) if it["in"] == "path"}
            place = {name: quote(known[name], safe="") for name in names}
            for body in good(world, operation.label):
                send(world, operation.Case(path_parameters=place, body=body, media_type="application/json"))
            if names and operation.method.upper() in ("GET", "DELETE"):
                send(world, operation.Case(path_parameters=place))
            if operation.method.upper() == "DELETE":
                world.renew()
    bad = {label: dict(seen) for label, seen in world.seen.items() if not any(200 <= it < 300 for it in seen)}
    assert set(bad) <= BYTES, bad
    assert len(world.seen) > 40, world.seen


def good(world: World, label: str) -> list[Any]:
    """Bodies that are taken, where rules hold that a schema does not say."""
    named = {"conversation_id": world.conversation}
    new = {"continuation_ids": [5, 6], "max_new_tokens": 3}
    sampling = {"sampling_params": {"max_new_tokens": 3}}
    text = {"prompt": "Hello", "max_tokens": 3}
    bodies: dict[str, list[Any]] = {
        "POST /restore_snapshot": [
            named, {"snapshot_id": world.snapshot, "pin_seconds": 1.5}, {**named, "create_new_request": True, **new},
            {**named, "branch_name": "kept", "create_new_request": True, **new, "append_to": "boundary"},
        ],
        "POST /v1/export": [named],
        "POST /tokenize": [{"prompt": "Hello"}],
        "POST /v1/tokenize": [{"prompt": "Hello"}],
        "POST /detokenize": [{"tokens": [70, 71]}],
        "POST /v1/detokenize": [{"tokens": [70, 71]}],
        "POST /generate": [
            {"input_ids": [1, 2, 3], **sampling}, {"text": "Hello", **sampling},
            {"input_ids": [1, 2, 3], "stream": True, **sampling},
        ],
        "POST /v1/generate": [
            {**named, "input_ids": [1, 2, 3], **sampling}, {**named, "text": "Hello", "turn": 1, **sampling},
            {**named, "input_ids": [1], "stream": True, **sampling},
        ],
        "POST /v1/completions": [text, {**text, **named}, {**text, **named, "stream": True}],
        "POST /v1/conversations/{conversation_id}/fork": [{"new_id": f"{world.conversation} fork", "turn": 1}],
        "POST /v1/conversations/{conversation_id}/tool_call": [{}],
        "PUT /v1/conversations/{conversation_id}/policy": [{"policy": "every_n_turns", "every_n_turns": 2}],
        "PATCH /v1/snapshots/{snapshot_id}": [{"pinned": True, "label": "x"}],
        "PATCH /v1/tiers": [{"disk_min_free_bytes": 0}],
        "POST /v1/chat/completions": [
            {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "conversation_id": f"{label} said"},
        ],
    }
    return bodies.get(label, [])


def attack(world: World, operation: Any, mode: GenerationMode) -> None:
    try:
        cases = operation.as_strategy(generation_mode=mode)
        cases.validate()
    except Exception as error:
        if "negat" in str(error).lower() or "Unsatisfiable" in type(error).__name__:
            return  # Whatever is sent to it is good.
        raise

    @hypothesis.seed(SEED ^ zlib.crc32(operation.label.encode()))
    @hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, database=None, print_blob=False,
        phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(data=st.data())
    def run(data: Any) -> None:
        case = data.draw(cases)
        world.name(case.path_parameters, data.draw, in_path=True)
        world.name(case.query, data.draw)
        world.name(case.body, data.draw)
        send(world, case)

    run()

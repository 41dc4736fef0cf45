"""Every error has a type, whatever is wrong with a request and wherever it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
from client_stage import Stage

JSON = {"content-type": "application/json"}
TIMEOUT_S = 30
OPENAI = {"/v1/chat/completions", "/v1/completions", "/v1/models"}
COMPATIBLE = {
    "/save_snapshot", "/restore_snapshot", "/list_snapshots", "/get_snapshot_info", "/delete_snapshot",
    "/tokenize_chat", "/generate", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/health",
    "/server_info",
}


def operations(stage: Stage) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in stage.get("/openapi.json")["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def filled(path: str) -> str:
    """A path with something in the place of its parameters."""
    for name in ("conversation_id", "branch_name"):
        path = path.replace(f"{{{name}}}", "nobody")
    return path.replace("{turn_number}", "1").replace("{snapshot_id}", "0190163d-8694-739b-aea5-966c26f8ad91")


def typed(answer: requests.Response, status: int, code: str, path: str) -> None:
    assert answer.status_code == status, (path, answer.status_code, answer.text)
    body = answer.json()
    kind = answer.headers["content-type"]
    if path in COMPATIBLE:
        assert kind == "application/json" and set(body) == {"success", "message", "error"}, body
    elif path in OPENAI:
        assert kind == "application/json" and body["error"]["code"] == code and body["error"]["param"] is None, body
    else:
        assert kind == "application/problem+json", (path, kind)
        assert body["type"] == f"urn:engram:problem:{code}" and body["code"] == code, body
        assert body["status"] == status and body["title"] and body["detail"] == body["message"], body
    assert body["success"] is False and body["message"] and isinstance(body["error"]["retryable"], bool), body
    assert body["error"]["type"] == code, (path, body)
    assert answer.headers["x-request-id"]


def send(stage: Stage, method: str, path: str, **more: Any) -> requests.Response:
    return requests.request(method, stage.url + path, timeout=TIMEOUT_S, **more)


def test_what_is_no_path(stage: Stage) -> None:
    for path in ("/", "/v1", "/v1/", "/nothing", "/v1/conversations/", "/save_snapshot/", "/v1/snapshots/a/b", "/%00"):
        typed(send(stage, "GET", path), 404, "not_found", path)


def test_every_path_refuses_other_methods_and_says_which_it_has(stage: Stage, subtests: pytest.Subtests) -> None:
    methods: dict[str, set[str]] = {}
    for method, path, _ in operations(stage):
        methods.setdefault(path, set()).add(method)
    assert len(methods) > 35
    for path, known in methods.items():
        for method in sorted({"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"} - known):
            with subtests.test(f"{method} {path}"):
                answer = send(stage, method, filled(path))
                typed(answer, 405, "method_not_allowed", path)
                assert {it.strip() for it in answer.headers["allow"].split(",")} - {"HEAD"} == known


def test_bodies_that_are_none(stage: Stage, subtests: pytest.Subtests) -> None:
    for method, path, operation in operations(stage):
        if "application/json" not in operation.get("requestBody", {}).get("content", {}) or "import" in path:
            continue
        with subtests.test(f"{method} {path}"):
            place = filled(path)
            form = send(stage, method, place, data=b"a=b", headers={"content-type": "application/x-www-form-urlencoded"})
            typed(form, 415, "unsupported_media_type", path)
            large = send(stage, method, place, data=b" " * (5 << 20), headers=JSON)
            typed(large, 413, "too_large", path)
            if {"passed", "generate"} & set(operation["tags"]) and path not in ("/restore_snapshot", "/tokenize_chat"):
                continue  # The inference server says what it is.
            for body in (b"", b"{", b"[]", b"1", b'{"a":1}x', b'"\xff"', b'{"conversation_id":"\\ud800"}'):
                typed(send(stage, method, place, data=body, headers=JSON), 400, "invalid_request", path)


def test_queries_and_paths_that_are_none(stage: Stage, subtests: pytest.Subtests) -> None:
    for method, path, operation in operations(stage):
        if not path.startswith("/v1/") or {"passed", "generate"} & set(operation["tags"]):
            continue
        kind = "application/octet-stream" if path == "/v1/import" else "application/json"
        more = {"data": b"{}", "headers": {"content-type": kind}} if method in ("POST", "PUT", "PATCH") else {}
        with subtests.test(f"{method} {path}"):
            if path != "/v1/export":
                typed(send(stage, method, filled(path) + "?unheard_of=1", **more), 400, "invalid_request", path)
            names = [it["name"] for it in operation["parameters"] if it["in"] == "query"]
            for bad in (["%ff", "%00"] if "tenant" in names else []):
                typed(send(stage, method, filled(path) + f"?tenant={bad}", **more), 400, "invalid_request", path)
            if "{" in path and "snapshot_id" not in path:
                for bad in ("%ff", "%00", "..%2Fx", "%2Fx", "x" * 256):
                    start = path.replace("{conversation_id}", bad, 1)
                    typed(send(stage, method, filled(start), **more), 400, "invalid_request", path)


def test_who_asks_from_elsewhere(stage: Stage) -> None:
    for method, path, _ in operations(stage):
        answer = send(stage, method, filled(path), headers={"host": "elsewhere.example", **JSON})
        typed(answer, 403, "host_not_allowed", path)

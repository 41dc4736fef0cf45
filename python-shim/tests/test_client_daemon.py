"""Both clients with the real daemon and the embedded engine behind it."""

import itertools
import pathlib
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from client_stage import Stage

from engram_sglang import client as api

Make = Callable[..., Any]
LENGTH = 8


def order(new: Iterable[int]) -> dict[str, Any]:
    """New tokens, and the model's own answer to them."""
    sampling = {"max_new_tokens": LENGTH, "ignore_eos": True, "temperature": 0}
    return {"input_ids": new, "sampling_params": sampling}


@pytest.fixture
def name() -> str:
    """Of a conversation that no other test has; with all that a path must not take for its own."""
    return f"a/b ?&#%ü-{uuid.uuid4()}"


def two_turns(client: Any, name: str, new: Iterable[int] = range(100, 140)) -> tuple[int, ...]:
    """All their tokens."""
    first = client.generate(name, **order(new))
    client.save(name)
    second = client.generate(name, **order(range(300, 310)))
    client.save(name)
    return (*new, *first.output_ids, *range(300, 310), *second.output_ids)


def test_the_daemon_tells_how_it_is(stage: Stage, make: Make) -> None:
    for url in (stage.url, stage.unix):
        client = make(url)
        assert client.health().status == "ok"
        assert client.ready() == api.Readiness(ready=True)
        status = client.status()
        assert status.ready and status.workers == 1 and status.boot
        assert {tier.tier: tier.budget_bytes for tier in client.tiers()}["ram"] > 0
        (worker,) = client.workers().workers
        assert worker.bound and worker.page_size == 1 and worker.model_name == "engram-tiny-hybrid"
        assert client.workers().refused == ()


def test_budgets_change_until_the_next_start(stage: Stage, make: Make) -> None:
    client = make(stage.url)
    before = {tier.tier: tier for tier in client.tiers()}
    ram = before["ram"].budget_bytes
    changed = {tier.tier: tier for tier in client.set_budgets(ram_budget_bytes=ram - 4096, disk_min_free_bytes=4096)}
    assert changed["ram"].budget_bytes == ram - 4096 and changed["disk"].min_free_bytes == 4096
    assert changed["disk"].budget_bytes == before["disk"].budget_bytes
    with pytest.raises(api.InvalidRequest):
        client.set_budgets()
    with pytest.raises(api.InvalidRequest):
        client.set_budgets(ram_budget_bytes=ram + 1)
    client.set_budgets(ram_budget_bytes=ram, disk_min_free_bytes=before["disk"].min_free_bytes)
    assert {tier.tier: tier.budget_bytes for tier in client.tiers()}["ram"] == ram


def test_a_conversation_goes_on_from_what_is_new(stage: Stage, make: Make, name: str) -> None:
    client = make(stage.url)
    first = client.generate(name, **order(range(100, 140)))
    assert len(first.output_ids) == LENGTH and first.finish_reason["type"] == "length"
    assert first.usage.wire_tokens == 40 and first.engram.from_turn == 0
    client.save(name)
    second = client.generate(name, **order(range(300, 310)))
    assert second.usage.wire_tokens == 10 and second.usage.cached_tokens > 0
    assert (second.engram.from_turn, second.engram.conversation_id) == (1, name)
    said = (*range(100, 140), *first.output_ids, *range(300, 310), *second.output_ids)
    assert client.tokens(name).token_ids == said
    assert client.tokens(name, turn=1).token_ids == said[:40 + LENGTH]
    # A turn that is not the latest: a branch.
    other = client.generate(name, turn=1, **order(range(300, 310)))
    assert other.output_ids == second.output_ids and other.engram.branched


def test_an_answer_comes_in_pieces(stage: Stage, make: Make, name: str) -> None:
    client = make(stage.url)
    whole = client.generate(f"{name}-whole", **order(range(100, 140)))
    with client.generate_stream(name, **order(range(100, 140))) as pieces:
        found = list(pieces)
        assert list(pieces) == []
    assert len(found) > 1 and all(piece.usage is None for piece in found[:-1])
    assert found[-1].output_ids[-1] == whole.output_ids[-1] and found[-1].text == whole.text
    assert found[-1].usage.wire_tokens == 40 and found[-1].engram.conversation_id == name
    # It may also go on without `with`, and be left.
    left = client.generate_stream(name, turn=1, **order(range(300, 310)))
    assert next(left)
    left.close()
    assert list(left) == []


def test_a_chat_sends_only_the_new_message(stage: Stage, make: Make, name: str) -> None:
    client = make(stage.url)
    more = {"conversation_id": name, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 0}
    first = client.chat([{"role": "user", "content": "My number is 42."}], **more)
    assert first.content and first.choices[0].finish_reason == "length"
    with client.chat_stream([{"role": "user", "content": "Which?"}], **more) as chunks:
        found = list(chunks)
    last = found[-1]
    assert "".join(chunk.content for chunk in found) and last.engram.from_turn == 1
    assert last.usage.cached_tokens > 0 and last.usage.wire_tokens < last.usage.prompt_tokens
    alone = client.tokenize_chat([{"role": "user", "content": "My number is 42."}], add_generation_prompt=True)
    known = client.tokens(name, turn=1).token_ids
    assert known[:alone.token_count] == alone.token_ids and len(known) == alone.token_count + LENGTH


def test_what_was_saved_is_found_marked_and_deleted(stage: Stage, make: Make, name: str) -> None:
    client = make(stage.unix)
    said = two_turns(client, name)
    saved = client.save(name, branch="before")
    assert saved.durable and saved.branch_name == "before" and saved.boundary > 0
    assert client.snapshot(saved.snapshot_id).boundary == saved.boundary
    info = client.snapshot_info(name, branch="before")
    assert info.fill_ids == said[:saved.boundary] and info.extra["layer_config"] == {"model_type": "hybrid"}
    assert client.snapshot_info(name, turn=2, with_tokens=False).fill_ids is None
    restored = client.restore(name, turn=1, pin_seconds=5)
    assert restored.turn_number == 1 and restored.from_tier and restored.pinned_until > restored.created_at
    page = client.list_snapshots(name, limit=1, offset=1)
    assert (page.total, [row.turn_number for row in page.rows]) == (3, [2])
    assert client.list_snapshots("nobody").rows == ()
    rows = list(client.snapshots(name, page_size=2))
    assert [row.branch_name or row.turn_number for row in rows] == [1, 2, "before"]
    assert len({row.snapshot_id for row in client.snapshots(page_size=1)}) >= 2
    pinned = client.pin(rows[0].snapshot_id, label="the first")
    assert pinned.pinned and pinned.label == "the first"
    assert client.label(rows[0].snapshot_id, None).label is None
    client.unpin(rows[0].snapshot_id)
    assert client.delete_branch(name, "before").names == 1
    assert client.delete_turn(name, 1).names == 1
    assert client.delete(rows[1].snapshot_id).snapshots == (rows[1].snapshot_id,)
    with pytest.raises(api.NotFound):
        client.snapshot(rows[1].snapshot_id)
    client.delete_conversation(name)
    with pytest.raises(api.NotFound) as error:
        client.conversation(name)
    assert error.value.status == 404 and error.value.request_id and not error.value.retryable


def test_conversations_fork_and_part(stage: Stage, make: Make, name: str) -> None:
    client = make(stage.url)
    two_turns(client, name)
    other = f"{name}-other"
    fork = client.fork(name, other, turn=1)
    assert fork.conversation_id == other and fork.turns_total == 1
    assert (fork.origin.conversation_id, fork.origin.turn_number) == (name, 1)
    with pytest.raises(api.AlreadyExists):
        client.fork(name, other, turn=1)
    client.generate(other, **order(range(500, 505)))
    compared = client.compare(name, 2, 2, other=other)
    assert compared.relation == "parted" and compared.common_tokens == 40 + LENGTH
    assert client.compare(name, 1, 2).relation == "b_extends_a"
    view = client.conversation(name, limit=1, offset=1)
    assert [turn.turn_number for turn in view.turns] == [2] and view.turns_total == 2
    assert [it.conversation_id for it in view.forks] == [other]
    tree = client.tree(other)
    assert tree.conversation_id == name and not tree.selected
    assert [it.conversation_id for it in tree.turns[0].forks] == [other] and tree.turns[0].forks[0].selected
    assert {name, other} <= {it.conversation_id for it in client.conversations(page_size=1)}
    assert sum(it.snapshots for it in client.namespaces(page_size=1)) > 0


def test_a_policy_is_its_own_until_it_is_taken_away(stage: Stage, make: Make, name: str) -> None:
    client = make(stage.url)
    own = client.set_policy(name, "every_n_turns", every_n_turns=3, min_interval_seconds=1.5)
    assert (own.policy, own.every_n_turns, own.min_interval_seconds, own.own) == ("every_n_turns", 3, 1.5, True)
    assert client.policy(name) == own
    assert client.unset_policy(name).own is False
    with pytest.raises(api.InvalidRequest):
        client.set_policy(name, "now and then")


def test_an_answer_goes_on_from_a_snapshot(stage: Stage, make: Make, name: str) -> None:
    client = make(stage.url)
    said = two_turns(client, name)
    new = {"continuation_ids": range(300, 310), "max_new_tokens": LENGTH}
    sampling = {"temperature": 0, "ignore_eos": True}
    resumed = client.resume(name, turn=1, **new, sampling_params=sampling, append_to="turn", request_id="mine")
    assert resumed.output_ids == said[-LENGTH:] and resumed.request_id == "mine" and resumed.base_tokens == 48
    assert resumed.rid and resumed.turn_number == 1
    client.mark_tool_call(name, turn=1)


def test_events_come_as_they_happen(stage: Stage, make: Make, name: str) -> None:
    client = make(stage.url)
    with client.events(["turn_finished", "saved"], conversation_id=name) as events:
        client.generate(name, **order(range(100, 140)))
        turn = next(event for event in events if event.name == "turn_finished")
        assert (turn.conversation_id, turn.turn_number) == (name, 1) and turn.id and turn.at
        client.generate(name, **order(range(200, 210)))
    # What came after one that was read is still there for who comes back.
    with client.events("turn_finished", conversation_id=name, last_event_id=turn.id) as events:
        assert any(event.turn_number == 2 for event in itertools.islice(events, 8))
    with pytest.raises(api.InvalidRequest), client.events("no such name") as events:
        pass


def test_a_pair_of_files_goes_out_and_comes_back(stage: Stage, make: Make, name: str, tmp_path: pathlib.Path) -> None:
    client = make(stage.url)
    # Tokens that nobody else has said, so that nothing of them is left once they are deleted.
    two_turns(client, name, [int(digit, 16) + 1 for digit in uuid.uuid4().hex])
    written = client.export_to(tmp_path / "chat", name)
    assert written.tensors == tmp_path / "chat.safetensors" and written.tensors.stat().st_size == written.tensor_bytes
    assert sorted(it.name for it in tmp_path.iterdir()) == ["chat.json", "chat.safetensors"]
    with pytest.raises(FileExistsError):
        client.export_to(tmp_path / "chat.json", name)
    assert client.export_to(tmp_path / "chat", name, turn=2, overwrite=True).boundary == written.boundary
    client.delete_conversation(name)
    taken = client.import_from(tmp_path / "chat", conversation_id=f"{name}-copy")
    assert (taken.exported_as, taken.boundary) == (written.snapshot_id, written.boundary)
    assert taken.durable and not taken.already_here
    assert client.import_from(tmp_path / "chat.safetensors", names=False).already_here
    with pytest.raises(api.NotFound):
        client.export_to(tmp_path / "other", "nobody")
    with written.tensors.open("r+b") as file:
        file.seek(written.tensor_bytes - 1)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(api.EngramError) as error:
        client.import_from(tmp_path / "chat")
    assert error.value.status is not None and error.value.status < 500
    written.description.write_bytes(b"{}")
    with pytest.raises(api.InvalidRequest):
        client.import_from(tmp_path / "chat")
    assert len(list(tmp_path.iterdir())) == 2


def test_what_cannot_be_has_a_type(stage: Stage, make: Make, name: str) -> None:
    client = make(stage.url)
    with pytest.raises(api.InvalidRequest) as error:
        client.generate(name, **order(range(1, 9)), n=1, rid="")
    assert error.value.type == "invalid_request" and error.value.status == 400
    with pytest.raises(api.InvalidRequest), client.chat_stream([], conversation_id=name):
        pass
    with pytest.raises(api.NotFound):
        client.restore("nobody")
    with pytest.raises(api.InvalidRequest):
        client.save(f"{name}\n")
    with pytest.raises(ValueError):
        client.conversation("")


def test_only_who_has_the_token_is_answered(engram_bin: pathlib.Path, make: Make) -> None:
    token = "0123456789abcdef-secret"
    stage = Stage(engram_bin, token=token, engine=False)
    try:
        assert make(stage.url, token=token).status().workers == 0
        for wrong in (make(stage.url, token="wrong"), make(stage.url)):
            with pytest.raises(api.Unauthorized) as error:
                wrong.status()
            assert token not in repr(error.value)
            with pytest.raises(api.Unauthorized), wrong.events() as events:
                next(events)
        # No server was configured to generate with.
        with pytest.raises(api.NotImplementedByDaemon):
            make(stage.url, token=token).generate("x", input_ids=[1])
    finally:
        stage.end()


def test_events_go_on_over_a_restart(engram_bin: pathlib.Path, make: Make) -> None:
    stage = Stage(engram_bin)
    try:
        client, idle = make(stage.url), make(stage.unix)
        idle.status()
        with client.events("turn_finished") as events, idle.events(reconnect_for=0) as gives_up:
            client.generate("x", **order(range(100, 140)))
            assert next(events).turn_number == 1
            client.save("x")
            stage.restart()
            # Connections that ended meanwhile are no error.
            assert idle.status().boot == client.status().boot
            missed = next(event for event in events if event.name == "missed")
            assert missed == api.Event(name="missed", count=None)
            with pytest.raises(api.Unreachable):
                list(gives_up)
        assert client.conversation("x").turns_total == 1
    finally:
        stage.end()


def test_a_tenant_is_sent_where_there_is_a_word_for_it(stage: Stage, make: Make, name: str) -> None:
    ours, theirs = make(stage.url), make(stage.url, tenant="theirs")
    two_turns(ours, name)
    assert ours.conversation(name).turns_total == 2
    for ask in (theirs.conversation, theirs.tokens, theirs.restore):
        with pytest.raises(api.NotFound):
            ask(name)
    assert theirs.conversation(name, tenant=None).turns_total == 2

"""The two files of a batch: what is read as a request, and what of an output survives a crash."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3hal.errors import InputError
from k3hal.offline.batch_input import BatchInput
from k3hal.offline.batch_output import BatchOutput
from k3hal.offline.settings import CHAT, COMPLETION, GenerateSettings


def _input(folder: Path, *lines: Any, **settings: Any) -> BatchInput:
    path = folder / "in.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return BatchInput(path, GenerateSettings(**settings))


def _record(name: str, ok: bool = True, text: str = "") -> dict[str, Any]:
    response, error = ({"body": text}, None) if ok else (None, {"message": text})
    return {"id": "batch_req_1", "custom_id": name, "response": response, "error": error, "request": "d"}


def test_both_forms_name_their_endpoint_and_take_the_flags_under_their_own_fields(tmp_path: Path) -> None:
    chat = {"messages": [], "max_tokens": 3}
    lines = [
        {"prompt": "x", "temperature": 0.5},
        {"custom_id": "b", "method": "POST", "url": CHAT, "body": chat},
        {"custom_id": "c", "body": {"prompt": "y", "logprobs": None}},
        {"messages": [], "logprobs": False, "custom_id": "d"},
    ]
    flags: dict[str, Any] = {"temperature": 1.5, "max_tokens": 9, "logprobs": 2, "thinking_effort": "low"}
    batch = _input(tmp_path, lines[0], "", *lines[1:], **flags)
    got = [(line.custom_id, line.endpoint, line.body) for line in batch]
    common = {"temperature": 1.5, "max_tokens": 9}
    chat_flags = {**common, "logprobs": True, "thinking_effort": "low"}
    assert got == [
        ("line-1", COMPLETION, {"prompt": "x", "temperature": 0.5, "max_tokens": 9, "logprobs": 2}),
        ("b", CHAT, {**chat_flags, "top_logprobs": 2, **chat}),
        ("c", COMPLETION, {**common, "prompt": "y", "logprobs": None}),
        ("d", CHAT, {**chat_flags, "messages": [], "logprobs": False}),
    ]
    assert batch.ids == {"line-1", "b", "c", "d"}


@pytest.mark.parametrize(
    ("line", "name", "message"),
    [
        ("{", "line-1", "not JSON: "),
        ("[" * 100_000, "line-1", "not JSON: "),
        (b"\xff\xfe{}".decode("latin-1"), "line-1", "not JSON: "),
        ([1], "line-1", "not a JSON object"),
        ({"custom_id": 3, "prompt": "x"}, "line-1", "custom_id must be a text that is not empty, got 3"),
        ({"custom_id": "", "prompt": "x"}, "line-1", "custom_id must be a text that is not empty, got ''"),
        ('{"custom_id": "\\ud800", "prompt": "x"}', "line-1", "custom_id '\\ud800' is not valid Unicode"),
        ({"custom_id": "a", "body": {"prompt": "x"}, "sed": 1}, "a", "unknown field 'sed' beside body"),
        ({"custom_id": "a", "body": "x"}, "a", "body must be a JSON object"),
        ({"method": "GET", "body": {"prompt": "x"}}, "line-1", "method must be POST, got 'GET'"),
        ({"url": "/v1/embeddings", "body": {}}, "line-1", "url must be /v1/chat/completions or /v1/completions, got"),
        ({"url": ["x"], "body": {}}, "line-1", "url must be"),
        ({"body": {}}, "line-1", 'a request has either "messages" or "prompt"'),
        ({"prompt": "x", "messages": []}, "line-1", 'a request has either "messages" or "prompt"'),
        ({"prompt": "x", "stream": True}, "line-1", "stream is not possible in a batch"),
    ],
)
def test_a_malformed_line_carries_its_error(line: Any, name: str, message: str, tmp_path: Path) -> None:
    only = next(iter(_input(tmp_path, line)))
    assert (only.custom_id, only.body) == (name, None)
    assert only.error.startswith(f"{tmp_path}/in.jsonl line 1: {message}")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "in.jsonl has no lines ("),
        (("", " "), "in.jsonl has no lines ("),
        (
            ({"custom_id": "a", "prompt": "x"}, {"custom_id": "a", "prompt": "y"}),
            "line 2: custom_id 'a' is also that of line 1",
        ),
        (
            ({"prompt": "x"}, {"custom_id": "line-1", "prompt": "y"}),
            "line 2: custom_id 'line-1' is also that of line 1",
        ),
    ],
)
def test_a_file_without_requests_or_with_one_id_twice_is_refused(lines: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        _input(tmp_path, *lines)
    assert message in str(error.value)


def test_requests_are_told_apart_by_everything_that_shapes_the_answer(tmp_path: Path) -> None:
    digests = {
        next(iter(_input(tmp_path, line, **flags))).digest
        for line in ({"prompt": "x"}, {"prompt": "y"}, "{")
        for flags in ({}, {"seed": 1})
    }
    assert len(digests) == 5  # a malformed line has no use for flags
    assert next(iter(_input(tmp_path, {"seed": 1, "prompt": "x"}))).digest in digests


records = st.lists(st.tuples(st.booleans(), st.text(max_size=8)), min_size=1, max_size=5)


@given(records, st.data())
def test_whatever_a_crash_leaves_is_repaired_to_whole_lines(
    entries: list[tuple[bool, str]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.jsonl"
        with BatchOutput(path) as output:
            for number, (ok, text) in enumerate(entries):
                output.append(_record(str(number), ok, text))
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        with BatchOutput(path) as output:
            kept = list(output.recorded)
            output.append(_record("new"))
        lines = path.read_bytes().splitlines(keepends=True)
        assert [json.loads(line)["custom_id"] for line in lines] == [*kept, "new"]
        # Nothing whole is lost: a line without its line feed is still whole.
        assert len(kept) in (whole[:cut].count(b"\n"), whole[:cut].count(b"\n") + 1)
        assert lines[: len(kept)] == whole.splitlines(keepends=True)[: len(kept)]


def test_a_line_that_only_lacks_its_line_feed_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(json.dumps(_record("a")))
    with BatchOutput(path) as output:
        assert (list(output.recorded), output.repaired) == (["a"], False)
        output.append(_record("b"))
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "b"]


def test_failed_lines_are_dropped_in_one_go(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(path) as output:
        for name, ok in (("a", True), ("b", False), ("c", True)):
            output.append(_record(name, ok))
        output.drop_failed()
        assert list(output.recorded) == ["a", "c"]
        output.append(_record("b"))
    with BatchOutput(path) as output:
        assert {name: entry.ok for name, entry in output.recorded.items()} == {"a": True, "c": True, "b": True}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl"]


@pytest.mark.parametrize(
    "content", ["hello", "hello\n", '{"a": 1}\n', "[]\n", "\n", '{"custom_id": 1, "response": 0}\n']
)
def test_a_file_that_is_no_output_is_refused_and_kept(content: str, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text(content)
    with pytest.raises(InputError, match="precious line 1 is no line of a batch's output"):
        BatchOutput(path)
    assert path.read_text() == content


def test_an_output_in_use_and_one_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(path), pytest.raises(InputError, match=r"out\.jsonl is in use by another batch"):
        BatchOutput(path)
    with pytest.raises(InputError, match="No such file or directory"):
        BatchOutput(tmp_path / "missing" / "out.jsonl")
    with pytest.raises(InputError, match="is not a regular file"):
        BatchOutput(Path("/dev/null"))


@pytest.mark.parametrize("fits", [0, 10])
def test_a_line_that_does_not_fit_the_disk_leaves_none(
    fits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(fd: int, data: bytes) -> int:
        if not fits:
            raise OSError(28, "No space left on device")
        return real(fd, data[:fits])

    real = os.write
    with BatchOutput(tmp_path / "out.jsonl") as output:
        output.append(_record("a"))
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(InputError, match=r"cannot write .*out\.jsonl: (No space left|only 10 of)"):
            output.append(_record("b"))
        monkeypatch.undo()
        output.append(_record("c"))
    with BatchOutput(tmp_path / "out.jsonl") as output:
        assert list(output.recorded) == ["a", "c"]

"""`k3hal generate` on a real model: what is printed where, and a batch that can stop anywhere and go on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from k3hal import LLM, SamplingParams
from k3hal.cli import main


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture(scope="module")
def llm(nano_dir: Path) -> Any:
    with LLM(nano_dir, dtype="float32") as llm:
        yield llm


@pytest.fixture
def run(nano_dir: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*args)`: `k3hal generate` on nano, in this process."""

    def generate(*args: object, code: int = 0) -> Done:
        capsys.readouterr()
        got = main(["generate", str(nano_dir), "--dtype", "float32", *map(str, args)])
        printed = capsys.readouterr()
        done = Done(got, printed.out, printed.err)
        assert got == code, done
        return done

    return generate


def test_rounded_activations_are_a_flag(run: Run, nano_dir: Path) -> None:
    flags = ("--prompt", "Hello", "--max-tokens", 8, "--temperature", 0, "--expert-activations", "mxfp8")
    with LLM(nano_dir, dtype="float32", expert_activations="mxfp8") as rounding:
        expected = rounding.generate("Hello", SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].text
    assert run(*flags).out == expected + "\n"


def test_text_on_stdout_and_the_rest_on_stderr(run: Run, llm: LLM) -> None:
    flags = ("--prompt", "Hello", "--max-tokens", 12, "--temperature", 0)
    expected = llm.generate("Hello", SamplingParams(max_tokens=12, temperature=0))[0].outputs[0].text
    for live in ("--stream", "--no-stream"):
        done = run(*flags, live)
        assert done.out == expected + "\n"
        assert "k3hal: 12 tokens after a prompt of 1, ended by length, in" in done.err


def test_a_chat_s_reasoning_is_no_part_of_its_text(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"role": "user", "content": "Hi"}]))
    flags = ("--max-tokens", 30, "--seed", 1)
    document = json.loads(run("--chat", "Hi", *flags, "--json").out)
    assert (document["schema"], document["model"]) == ("k3hal.generate/1", "nano")
    message = document["choices"][0]["message"]
    for source in (("--chat", "Hi"), ("--messages", file)):
        for live in ("--stream", "--no-stream"):
            done = run(*source, *flags, live)
            assert done.out == (message["content"] or "") + "\n"
            assert message["reasoning_content"] in done.err


def test_a_prompt_may_come_from_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "stdin"
    source.write_text("Hello")
    with source.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        from_stdin = run("--prompt", "-", "--temperature", 0).out
    assert from_stdin == run("--prompt", "Hello", "--temperature", 0).out


def test_several_answers_of_one_seed_differ(run: Run) -> None:
    flags = ("--prompt", "Hello", "--n", 3, "--seed", 5, "--max-tokens", 12)
    choices = json.loads(run(*flags, "--logprobs", 2, "--json").out)["choices"]
    texts = [choice["text"] for choice in choices]
    assert len(set(texts)) == 3
    assert all(len(top) == 2 for choice in choices for top in choice["logprobs"]["top_logprobs"])
    done = run(*flags)
    assert done.out == "".join(text + "\n" for text in texts)
    assert [line for line in done.err.splitlines() if line.startswith("---")] == ["--- 0", "--- 1", "--- 2"]


def test_a_refused_request_is_one_line(run: Run) -> None:
    done = run("--prompt", "", code=4)
    assert done.err.splitlines()[-1] == "k3hal: error: the prompt is empty"
    assert json.loads(run("--prompt", "", "--json", code=4).out)["errors"][0]["code"] == "bad_request"


REQUESTS = [
    {"custom_id": "chat", "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}},
    *({"prompt": f"Number {number}"} for number in range(6)),
]
BAD = [
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "model": "other"},
    {"messages": [{"role": "cook"}]},
    {"prompt": "half a character \ud83d"},
]


class Batch:
    """The two files of a batch; `answers` maps each id to its text, or to its error's message."""

    def __init__(self, folder: Path, *lines: Any) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.write(*lines)
        self.flags = ("--input", self.input, "--output", self.output, "--max-tokens", 5, "--temperature", 0)

    def write(self, *lines: Any) -> None:
        self.input.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))

    @property
    def answers(self) -> dict[str, str]:
        records = [json.loads(line) for line in self.output.read_text().splitlines()]
        assert len({record["custom_id"] for record in records}) == len(records)
        return {record["custom_id"]: _said(record) for record in records}


def _said(record: dict[str, Any]) -> str:
    assert (record["response"] is None) != (record["error"] is None)
    if record["error"]:
        return record["error"]["message"]
    assert record["response"]["status_code"] == 200
    choice = record["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else json.dumps(choice["message"])


def test_a_batch_answers_every_line_as_alone_and_goes_on_where_it_stopped(run: Run, llm: LLM, tmp_path: Path) -> None:
    batch = Batch(tmp_path, *REQUESTS)
    done = run(*batch.flags)
    assert done.out == "" and "k3hal: 7 lines: 0 done before, 7 now, 0 failed, " in done.err
    answers = batch.answers
    params = SamplingParams(max_tokens=5, temperature=0)
    alone = {f"line-{n + 2}": llm.generate(f"Number {n}", params)[0].outputs[0].text for n in range(6)}
    assert {name: text for name, text in answers.items() if name != "chat"} == alone
    lines = batch.output.read_bytes().splitlines(keepends=True)
    batch.output.write_bytes(b"".join(lines[:3]) + lines[3][:40])
    done = run(*batch.flags, "--json", "--max-num-seqs", 2)
    summary = json.loads(done.out)
    assert (summary["schema"], summary["lines"], summary["skipped"]) == ("k3hal.generate_batch/1", 7, 3)
    assert (summary["answered"], summary["failed"]) == (4, 0)
    assert f"removed an unfinished last line of {batch.output}" in done.err
    assert batch.answers == answers
    assert batch.output.read_bytes().startswith(b"".join(lines[:3]))


def test_lines_that_fail_are_recorded_and_can_be_retried(run: Run, tmp_path: Path) -> None:
    batch = Batch(tmp_path, *REQUESTS, *BAD, "{\n")
    run(*batch.flags, code=1)
    answers = batch.answers
    assert answers["line-8"] == "temperature must be in [0, 100], got -1"
    assert "the model 'other' does not exist" in answers["line-9"]
    assert "messages[0].role" in answers["line-10"]
    assert "no low surrogate" in answers["line-11"]
    assert answers["line-12"].startswith(f"{batch.input} line 12: not JSON")
    content = batch.output.read_bytes()
    assert "12 done before, 0 now, 5 failed" in run(*batch.flags, code=1).err
    assert batch.output.read_bytes() == content
    assert "answers another request with custom_id 'line-8'" in _changed(run, batch, code=4).err
    assert "7 done before, 5 now, 4 failed" in run(*batch.flags, "--retry-failed", code=1).err
    assert len(batch.answers["line-8"]) and "temperature" not in batch.answers["line-8"]


def _changed(run: Run, batch: Batch, code: int) -> Done:
    """The batch after line 8 was put right in its input."""
    batch.write(*REQUESTS, {"prompt": "x"}, *BAD[1:], "{\n")
    return run(*batch.flags, code=code)


def test_a_dead_engine_ends_the_batch_without_blaming_its_lines(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3hal.engine.runner import ModelRunner

    def execute(self: ModelRunner, plan: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(ModelRunner, "execute", execute)
    batch = Batch(tmp_path, *REQUESTS)
    done = run(*batch.flags, "--max-num-seqs", 1, code=3)
    assert done.err.splitlines()[-1].startswith("k3hal: error: the engine has failed: RuntimeError: the device is gone")
    assert set(batch.answers.values()) <= {"RuntimeError: the device is gone"} and len(batch.answers) < len(REQUESTS)


def test_ctrl_c_keeps_what_is_done(nano_dir: Path, tmp_path: Path) -> None:
    batch = Batch(tmp_path, {"prompt": "a"}, {"prompt": "b", "max_tokens": 5000, "ignore_eos": True})
    command = [sys.executable, "-P", "-m", "k3hal", "generate", nano_dir, *batch.flags]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env=environment)
    with contextlib.closing(process.stderr or sys.stderr):
        deadline = time.monotonic() + 120
        while not (batch.output.exists() and batch.output.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        err = process.stderr.read() if process.stderr else ""
    assert process.wait(30) == 130
    assert err.splitlines()[-1] == ("k3hal: interrupted with 1 of 2 lines done; the same command goes on from there")
    assert list(batch.answers) == ["line-1"]

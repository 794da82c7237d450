"""`k3hal render` prints ids and text, and its mistakes are one line."""

import io
import json
import sys

import pytest

from k3hal.cli import main

BODY = {"messages": [{"role": "user", "content": "Hi"}], "thinking": False}


def test_json_output(tmp_path, synthetic_dir, capsys):
    (tmp_path / "body.json").write_text(json.dumps(BODY))
    assert main(["render", str(tmp_path / "body.json"), "--tokenizer", str(synthetic_dir), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "k3hal.render/1"
    assert answer["ids"][:6] == [372, 261, 265, 266, 269, 1]
    assert answer["text"].startswith('<|open|>message role="user"<|sep|>Hi')


def test_standard_input(synthetic_dir, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(BODY).encode())))
    assert main(["render", "-", "--tokenizer", str(synthetic_dir)]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("<|open|>response<|sep|>\n")
    assert captured.err == "23 tokens\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON: line 1 column 2"),
        (b"\xff", "not readable JSON"),
        (b"[]", "must hold a JSON object"),
        (b"[" * 100_000, "not readable JSON"),
        (b"9" * 5000, "not readable JSON"),
        (b'{"messages": []}', "messages must be a non-empty list"),
        (b'{"messages": [{"role": "user", "content": "x"}], "thinking_effort": "medium"}', "low, high, max"),
    ],
)
def test_mistakes_are_one_line_and_exit_4(tmp_path, synthetic_dir, capsys, content, message):
    (tmp_path / "body.json").write_bytes(content)
    assert main(["render", str(tmp_path / "body.json"), "--tokenizer", str(synthetic_dir)]) == 4
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_missing_files_are_named(tmp_path, synthetic_dir, capsys):
    assert main(["render", str(tmp_path / "none.json"), "--tokenizer", str(synthetic_dir)]) == 4
    assert "none.json: No such file" in capsys.readouterr().err
    (tmp_path / "body.json").write_text(json.dumps(BODY))
    assert main(["render", str(tmp_path / "body.json"), "--tokenizer", str(tmp_path)]) == 4
    assert "cannot read the tokenizer" in capsys.readouterr().err

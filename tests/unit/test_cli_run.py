"""Every outcome of the command line has its exit code and its one line; a user's mistake shows no traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from k3hal import __version__, errors
from k3hal.cli import app as cli_app
from k3hal.cli import main


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """`verb(function)` registers `k3hal probe` for one test."""

    def register(function: Callable[..., Any]) -> None:
        monkeypatch.setattr(sys.modules[__name__], "_function", function, raising=False)
        row = cli_app.Verb(f"{__name__}:_function", "A verb of the tests.")
        monkeypatch.setitem(cli_app.VERBS, "probe", row)

    return register


def _raiser(error: BaseException) -> Callable[..., None]:
    def run(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
        raise error

    return run


ERRORS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("error_class", ERRORS, ids=lambda c: c.__name__)
def test_an_error_is_one_line_and_its_class_s_exit_code(
    error_class: type[errors.K3HALError], verb: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(_raiser(error_class("layer 3 has no weights", hint="run `k3hal model verify`")))
    assert main(["probe"]) == error_class.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "k3hal: error: layer 3 has no weights (run `k3hal model verify`)\n"


@pytest.mark.parametrize("error_class", ERRORS, ids=lambda c: c.__name__)
def test_with_json_the_error_is_also_on_stdout(
    error_class: type[errors.K3HALError], verb: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(_raiser(error_class("too large", hint="ask for less")))
    assert main(["probe", "--json"]) == error_class.exit_code
    document = json.loads(capsys.readouterr().out)
    entry = {"code": error_class.code, "message": "too large", "hint": "ask for less"}
    assert document == {"schema": "k3hal.error/1", "errors": [entry]}


def test_any_other_exception_is_a_bug_and_says_so(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    verb(_raiser(ValueError("boom\nand more")))
    assert main(["probe", "--json"]) == 3
    out, err = capsys.readouterr()
    assert err.startswith(f"k3hal: error: this is a bug in k3hal {__version__}: ValueError: boom (please report it")
    assert err.count("\n") == 1
    assert json.loads(out)["errors"][0]["code"] == "internal"


@pytest.mark.parametrize("error", [ValueError("boom"), errors.UsageError("bad flag")])
def test_debug_shows_the_traceback(
    error: Exception, verb: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("K3HAL_DEBUG", "1")
    verb(_raiser(error))
    main(["probe"])
    err = capsys.readouterr().err
    assert "Traceback" in err and "in run" in err and err.splitlines()[-1].startswith("k3hal: error: ")


def test_interrupt_is_quiet(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    verb(_raiser(KeyboardInterrupt()))
    assert main(["probe"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (1, 1), (2, 2)])
def test_a_verb_returns_its_exit_code(result: int | None, code: int, verb: Any) -> None:
    verb(lambda: result)
    assert main(["probe"]) == code


def test_a_verb_may_raise_typer_exit(verb: Any) -> None:
    verb(_raiser(typer.Exit(1)))
    assert main(["probe"]) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["doctro"], "No such command 'doctro'. Did you mean 'doctor'? (see `k3hal --help`)"),
        (["--bogus"], "No such option: --bogus (see `k3hal --help`)"),
        (["doctor", "--jsn"], "No such option: --jsn (Possible options: --json) (see `k3hal doctor --help`)"),
        (["doctor", "one", "extra"], "Got unexpected extra argument(s) (extra) (see `k3hal doctor --help`)"),
    ],
)
def test_usage_errors_are_4(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 4
    assert capsys.readouterr() == ("", f"k3hal: error: {message}\n")


def test_usage_error_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctro", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "usage"


def test_json_after_a_double_dash_is_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--", "--json"]) == 4
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("args", "usage"), [([], "Usage: k3hal "), (["model"], "Usage: k3hal model ")])
def test_a_group_without_a_verb_shows_its_help(args: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 4
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(usage)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"k3hal {__version__}\n"


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert set(cli_app.VERBS) <= {line[0] for line in lines if line}


def test_every_row_of_the_table_loads() -> None:
    for name in cli_app.VERBS:
        assert cli_app.load_verb(name).name == name


def test_an_unknown_variable_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("K3HAL_OP", "x")
    assert main(["--version"]) == 4
    assert (
        capsys.readouterr().err == "k3hal: error: unknown environment variable K3HAL_OP (did you mean 'K3HAL_OPS'?)\n"
    )


def test_any_text_can_be_printed_whatever_the_locale(verb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    verb(lambda: print("Grüße, 世界"))
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert main(["probe"]) == 0
    assert printed.getvalue().decode() == "Grüße, 世界\n"


def test_json_shows_a_name_that_is_not_utf8_by_escapes(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    verb(_raiser(errors.UsageError("no folder 'm\udcff'")))
    assert main(["probe", "--json"]) == 4
    out = capsys.readouterr().out
    assert out.isascii() and json.loads(out)["errors"][0]["message"] == "no folder 'm\udcff'"


def _run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "k3hal", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("args", ["plan --matrix", "plan --matrix --json", "plan --hardware b300 --json"])
def test_no_room_for_the_output_is_one_line(args: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-P", "-m", "k3hal", *args.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (4, "k3hal: error: cannot write: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_refusal_without_room_for_its_document_keeps_its_line_and_code() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-P", "-m", "k3hal", "plan", "--hardware", "b200", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "1680 GB" in done.stderr, done.stderr


@pytest.mark.parametrize("args", ["plan --hardware b300", "plan --hardware b300 --json", "--version"])
def test_a_closed_standard_output_is_no_bug(args: str) -> None:
    command = ["sh", "-c", f'"$0" -P -m k3hal {args} >&-', sys.executable]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", "-m", "k3hal", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [("k3hal doc", "doctor"), ("k3hal doctor --js", "--json"), ("k3hal --vers", "--version")],
)
def test_completion(words: str, expected: str) -> None:
    position = str(len(words.split()) - 1)
    done = _run(_K3HAL_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=position)
    assert (done.returncode, done.stdout.split()) == (0, [expected])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    done = _run(_K3HAL_COMPLETE=f"source_{shell}")
    assert done.returncode == 0
    assert "_K3HAL_COMPLETE" in done.stdout

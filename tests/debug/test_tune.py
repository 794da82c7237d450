"""Tuning takes the fastest tactic among those proven right, and never one that is wrong, crashes or hangs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.cli import main
from k3hal.debug.case import Case, sample_cases
from k3hal.debug.case_file import load_case
from k3hal.debug.check import check
from k3hal.debug.forks import Forks, Outcome
from k3hal.debug.target import Target, find_target
from k3hal.debug.tune import Limits, Tuner
from k3hal.debug.tune_jobs import GATE
from k3hal.debug.tune_timing import LEAST_GAIN, ROUNDS, compare_rounds
from k3hal.debug.verdict import Verdict
from k3hal.dispatch import registry as registries
from k3hal.dispatch.errors import BackendError
from k3hal.dispatch.probe import probe
from k3hal.dispatch.provider import DEFAULT, Provider
from k3hal.dispatch.registry import Registry, default_registry, get_operator
from k3hal.dispatch.select import Selector
from k3hal.dispatch.tactic_file import load_tactics, tactics_file, update_tactics
from k3hal.dispatch.tactics import TacticCache

CPU = probe("cpu")
BACKEND = "tactic_backend"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The backend in this process's registry, importable by child processes; an empty tactic cache."""
    folder = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module(BACKEND)
    there = default_registry()
    mine = Registry(dict(there.backends), list(there.providers))
    mine.add_module(module)
    monkeypatch.setattr(registries, "_default", [mine])
    monkeypatch.setenv("PYTHONPATH", ":".join([folder, *filter(None, sys.path)]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("K3HAL_TACTICS", "on")
    return module


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Processes that know the backend too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join([str(Path(__file__).parent), *filter(None, sys.path)]))
        with Forks((BACKEND,)) as started:
            yield started


def _provider(name: str) -> Provider:
    return next(p for p in default_registry().of("silu_and_mul") if p.id == f"tactical.{name}")


def _cases() -> list[Case]:
    return list(sample_cases(get_operator("silu_and_mul"), dtypes=["float32"]))


def _decide(name: str, case: Case) -> Any:
    from k3hal.dispatch.overrides import parse_overrides

    overrides = parse_overrides(f"silu_and_mul=tactical.{name}", "--ops", default_registry())
    return Selector(default_registry(), overrides, "warn", load_tactics()).decide(case.call(CPU))


def test_faulty_tactics_are_rejected_with_a_case_and_the_faster_right_one_is_taken(
    backend: ModuleType, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases, provider = _cases(), _provider("mixed")
    tuner = Tuner(CPU, forks, Limits(120.0, 0.1))
    (result,) = tuner.tune(provider, cases, cases)
    rejected = {r.tactic: r for r in result.new}
    assert rejected.keys() == backend.WRONG.keys()
    assert {name: r.status for name, r in rejected.items() if r.status != "Fail"} == {"crash": "Crash"}
    assert "SIGABRT" in rejected["crash"].reason
    assert "finite" in rejected["nan_tile"].reason
    assert {entry.tactic for entry in result.tuned} == {"faster"}
    assert all(entry.gain > max(entry.noise, LEAST_GAIN) for entry in result.tuned)
    for name in ("wrong_and_fast", "nan_tile", "unwritten"):
        case = load_case(rejected[name].case)
        target = Target("silu_and_mul", name, backend.WRONG[name])
        assert check(case, target).status == "Fail"
    (again,) = tuner.tune(provider, cases, cases[:1])
    assert (again.new, {r.tactic for r in again.known}) == ((), backend.WRONG.keys())
    decision = _decide("mixed", cases[0])
    assert decision.function() is backend.faster
    assert decision.tactic_source.startswith("tuned: ")
    monkeypatch.setattr(provider.fn, "__module__", "k3hal.dispatch.errors")
    assert _decide("mixed", cases[0]).tactic_source == "no longer tuned: the provider's source changed"


def test_a_hang_is_a_rejection_and_a_wrong_default_tunes_nothing(backend: ModuleType, forks: Forks) -> None:
    cases = _cases()[:1]
    tuner = Tuner(CPU, forks, Limits(2.5, 0.01))
    (result,) = tuner.tune(_provider("hanging"), cases, cases)
    assert [(r.tactic, r.status) for r in result.new] == [("hang", "Timeout")]
    assert load_case(result.new[0].case).op == "silu_and_mul"
    assert [entry.tactic for entry in result.tuned] == [DEFAULT]
    (result,) = tuner.tune(_provider("broken"), cases, cases)
    assert result.failed.startswith("the default tactic is not right: Fail on ")
    assert (result.tuned, result.new) == ((), ())
    assert _decide("hanging", cases[0]).tactic == DEFAULT


def test_a_plugin_that_cannot_be_imported_is_one_line(backend: ModuleType) -> None:
    with pytest.raises(BackendError, match="no_such_plugin"), Forks(("no_such_plugin",)):
        pass


class _Script:
    """Stands for the processes: what each tactic does is written down."""

    def __init__(self, wrong: set[str], speed: dict[str, float]) -> None:
        self.wrong, self.speed, self.timed = wrong, speed, list[str]()

    def run(self, job: str, timeout: float, *, target: str, **_: Any) -> Outcome:
        name = target.partition(":")[2]
        if job == GATE:
            verdict = Verdict("silu_and_mul", target, "case", "Fail", ("wrong",)).to_json()
            return Outcome("Done", {"case": 0, "verdict": verdict} if name in self.wrong else {"case": None})
        self.timed.append(name)
        return Outcome("Done", [[1.0, self.speed[name], 1.0]] * ROUNDS)


_NAMES = ("wrong_and_fast", "nan_tile", "unwritten", "crash", "slower", "faster")


@given(wrong=st.sets(st.sampled_from(_NAMES)), speed=st.fixed_dictionaries(dict.fromkeys(_NAMES, st.floats(0.01, 3.0))))
def test_a_wrong_one_never_wins_however_fast(wrong: set[str], speed: dict[str, float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        module = importlib.import_module(BACKEND)
        patch.setattr("k3hal.debug.tune.update_tactics", lambda change: change(TacticCache()))
        patch.setattr("k3hal.debug.tune.load_tactics", TacticCache)
        patch.setattr("k3hal.debug.tune._keep", lambda case, name: Path(name))
        patch.setattr("k3hal.debug.tune.CaseFiles.case", lambda files, case: case.id)
        patch.setattr("k3hal.debug.tune.CaseFiles.expected", lambda files, case: case.id)
        (provider,) = (p for p in getattr(module.mixed, registries.ATTRIBUTE) if p.name == "mixed")
        script, case = _Script(wrong, speed), _cases()[0]
        tuner = Tuner(CPU, script)  # pyright: ignore[reportArgumentType]
        (result,) = tuner.tune(replace(provider, backend="tactical"), [case], [case])
    right = {name: speed[name] for name in _NAMES if name not in wrong}
    best = min(right, key=lambda name: right[name], default=DEFAULT)
    if best != DEFAULT and 1 - right[best] <= LEAST_GAIN:
        best = DEFAULT
    assert result.tuned[0].tactic == best
    assert set(script.timed) == right.keys()
    assert {r.tactic for r in result.new} == wrong


_seconds = st.floats(1e-6, 1.0)


@given(st.lists(st.tuples(_seconds, _seconds, st.floats(1.0, 10.0)), min_size=2, max_size=ROUNDS))
def test_what_is_never_faster_does_not_win(rounds: list[tuple[float, float, float]]) -> None:
    slower = [(before, max(before, after) * times, after) for before, after, times in rounds]
    assert not compare_rounds(slower).wins


@given(st.lists(st.floats(0.97, 1.03), min_size=ROUNDS, max_size=ROUNDS))
def test_a_gain_within_the_noise_does_not_win_and_one_above_does(wobble: list[float]) -> None:
    within = [(1.0, 0.98, 1.0 + (0.1 if n % 2 else -0.1)) for n in range(ROUNDS)]
    assert not compare_rounds(within).wins
    above = compare_rounds([(1.0, 0.5 * w, 1.0) for w in wobble])
    assert above.wins
    assert 0.48 < above.gain < 0.52


def _tuned(case: Case, tactic: str = "faster") -> None:
    from k3hal.dispatch.tactics import Tuned, fingerprint

    made_for = fingerprint(_provider("mixed"), CPU)
    names = ("silu_and_mul", "tactical.mixed", case.dtype, case.phase, dict(case.dims), made_for)
    update_tactics(lambda cache: cache.with_tuned(Tuned(*names, tactic, 0.5, 0.01, 9)))


def test_current_runs_what_was_tuned_unless_that_is_off(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _cases()[0]
    _tuned(case)
    monkeypatch.setenv("K3HAL_OPS", "silu_and_mul=tactical.mixed")
    assert find_target(case, "tactical.mixed", CPU).fn is backend.mixed
    assert find_target(case, "tactical.mixed:slower", CPU).fn is backend.slower
    assert find_target(case, "tactical.mixed:slower", CPU).id == "tactical.mixed:slower"
    assert _decide("mixed", case).tactic == "faster"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], backend: ModuleType) -> Callable[..., tuple[int, str, str]]:
    def call(*args: str) -> tuple[int, str, str]:
        code = main(["op", *args])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_the_verb_lists_explains_and_forgets(run: Callable[..., Any]) -> None:
    case = next(iter(sample_cases(get_operator("silu_and_mul"), dtypes=["bfloat16"])))
    assert run("tune", "--list")[1] == "nothing is tuned\n"
    _tuned(case)
    rows = json.loads(run("tune", "--list", "--json")[1])
    assert (rows["schema"], rows["tuned"][0]["tactic"], rows["tuned"][0]["void"]) == ("k3hal.op_tune/1", "faster", "")
    dims = ["--dims", ",".join(f"{k}={v}" for k, v in case.dims.items())] if case.dims else []
    options = ["--device", "cpu", "--phase", case.phase, *dims, "--ops", "silu_and_mul=tactical.mixed"]
    out = run("explain", "silu_and_mul", *options)[1]
    assert "    tactic faster: tuned: 50.0 % faster than default, noise 1.0 %, 9 cases\n" in out
    assert run("tune", "rms_norm", "--clear")[0] == 0
    assert load_tactics().tuned
    assert run("tune", "--clear")[0] == 0
    assert not tactics_file().exists()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": "k3hal.tactics/2"}',
        '{"schema": "k3hal.tactics/1", "tuned": {}, "rejected": []}',
        '{"schema": "k3hal.tactics/1", "tuned": [{"op": "rms_norm"}], "rejected": []}',
        '{"schema": "k3hal.tactics/1", "tuned": [], "rejected": [{"op": 3}]}',
        "\u00ff" * 3,
    ],
)
def test_a_malformed_cache_is_one_line_that_names_the_file(run: Callable[..., Any], text: str) -> None:
    tactics_file().parent.mkdir(parents=True)
    tactics_file().write_text(text, "latin-1")
    for command in (("tune", "--list"), ("explain", "rms_norm", "--device", "cpu")):
        code, out, err = run(*command)
        assert (code, out) == (4, "")
        assert str(tactics_file()) in err
        assert len(err.splitlines()) == 1
    assert run("tune", "--clear")[0] == 0
    assert run("tune", "--list")[0] == 0


_FIELDS = ("op", "provider", "dtype", "phase", "dims", "made_for", "device", "source", "versions", "gain")
_PLAIN = st.none() | st.booleans() | st.floats() | st.text(max_size=5)


@settings(max_examples=40)
@given(st.recursive(_PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(_FIELDS), inner)))
def test_no_content_of_an_entry_is_more_than_a_refusal(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    from k3hal.dispatch.errors import InputError

    path = tmp_path_factory.getbasetemp() / "tactics.json"
    for key in ("tuned", "rejected"):
        document = {"schema": "k3hal.tactics/1", "tuned": [], "rejected": []} | {key: [data]}
        path.write_text(json.dumps(document))
        with pytest.raises(InputError, match=r"tactics\.json"):
            load_tactics(path)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("tune", "no_such"), 4, "no operator matches 'no_such'"),
        (("tune", "rms_norm", "--device", "cpu"), 2, "rms_norm: no provider here has tactics"),
        (("tune", "kda_chunk", "--provider", "nobody"), 4, "no provider here is called 'nobody'"),
        (("tune", "kda_chunk", "--timeout", "0"), 4, "--timeout and --seconds are above 0"),
        (("tune", "kda_chunk", "--case", "no.k3case"), 4, "no.k3case"),
    ],
)
def test_a_mistake_is_one_line(run: Callable[..., Any], args: tuple[str, ...], code: int, message: str) -> None:
    got, out, err = run(*args)
    assert (got, out) == (code, "")
    assert message in err
    assert len(err.splitlines()) == 1

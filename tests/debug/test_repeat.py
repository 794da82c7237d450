"""A step that is not finite is repeated: the case is the one of the step itself, and the model does not notice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k3hal.debug import shadow_figures
from k3hal.debug.capture import Site, Weights
from k3hal.debug.case import Case
from k3hal.debug.case_file import load_case
from k3hal.debug.dump_spec import parse_dump
from k3hal.debug.memory import same_bytes
from k3hal.debug.record import Recorder
from k3hal.debug.shadow import Shadow, parse_shadow
from k3hal.dispatch.observe import Observer, Place, Step, is_repetition, observing
from k3hal.dispatch.select import Decision
from k3hal.llm import LLM
from k3hal.model.write import write_preset
from k3hal.sampling_params import SamplingParams

PROMPTS = [list(range(300, 312)), list(range(20, 25)), list(range(40, 49))]
TOKENS = (6, 14, 3)
LENGTH = 15
"""Tokens in a sequence from which on a fault shows: in step 3 of the first prompt, whose step 0 is its prefill."""


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "nano"
    write_preset("nano", target)
    return target


class Long:
    """Changes what an operator returns in one layer, in rows of sequences of at least `LENGTH` tokens.

    It depends on nothing but the step, so a repetition meets it where the step did. The layer comes after `MLA_LAYER`.
    """

    MLA_LAYER = 3

    def __init__(self, op: str, layer: int, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.op, self.layer, self.change = op, layer, change
        self._lengths = torch.zeros(0)

    def bound(self, place: Place, decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
        if decision.call.op == "mla_decode" and place.layer == self.MLA_LAYER:
            return self._noted(Site(place, decision, Weights()), fn)
        if decision.call.op != self.op or place.layer != self.layer:
            return fn
        return lambda *args, **kwargs: self.change(fn(*args, **kwargs), self._lengths >= LENGTH)

    def prepared(self, place: Place, decision: Decision, given: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
        pass

    def _noted(self, site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._lengths = site.named(args, kwargs)["seq_lens"]
            return fn(*args, **kwargs)

        return noted


def _poison(out: Tensor, rows: Tensor) -> Tensor:
    out = out.clone()
    out[rows, 0] = torch.nan
    return out


class Noise:
    """A provider that computes something else each time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, out: Tensor, rows: Tensor) -> Tensor:
        self.calls += 1
        return _poison(out + 0.01 * self.calls, rows)


class Once:
    """Goes wrong in its third call alone."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, out: Tensor, rows: Tensor) -> Tensor:
        self.calls += 1
        return _poison(out, torch.ones_like(rows)) if self.calls == 3 else out


def _run(nano: Path, *watching: Observer, prompts: int = 1, **options: Any) -> list[tuple[list[int], str | None]]:
    """Tokens and error of each prompt, greedily, by a model built under these observers."""
    if watching:
        with observing(watching[0]):
            return _run(nano, *watching[1:], prompts=prompts, **options)
    with LLM(nano, device="cpu", dtype="float32", max_model_len=128, **{"max_num_seqs": 4, **options}) as llm:
        each = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in TOKENS[:prompts]]
        outputs = [request.outputs[0] for request in llm.generate(PROMPTS[:prompts], each)]
        return [(list(output.token_ids), output.error) for output in outputs]


def _recorder(folder: Path, when: str = "nonfinite", ops: str = "*") -> Recorder:
    return Recorder(parse_dump(f"ops={ops},when={when},dir={folder}"))


def _in_layer(recorder: Recorder, op: str, layer: int, step: int) -> Case:
    cases = map(load_case, recorder.files)
    (case,) = (c for c in cases if (c.op, c.origin["layer"], c.origin["step"]) == (op, layer, step))
    return case


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    tensors = {name for name in a if isinstance(a[name], Tensor)}
    return bool(tensors) and a.keys() == b.keys() and all(same_bytes(a[name], b[name]) for name in tensors)


@pytest.mark.parametrize(("op", "layer"), [("kda_decode", 4), ("kda_decode", 5), ("mla_decode", 6)])
def test_a_later_step_is_recorded_as_it_was(
    nano: Path, tmp_path: Path, op: str, layer: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What `step:N` copies ahead of each call, live, is what `nonfinite` finds by going back."""
    recorder, live = _recorder(tmp_path / "a"), _recorder(tmp_path / "b", "step:3", op)
    _run(nano, Long(op, layer, _poison), recorder, live)
    first = load_case(recorder.files[0])
    assert first.origin["step"] == 3 and first.origin["repeats"] is True
    ahead = _in_layer(live, op, layer, 3)
    assert (first.op, first.origin["layer"], first.origin["phase"]) == (op, layer, "decode")
    assert _same(first.args, ahead.args) and _same(first.recorded, ahead.recorded)
    assert bool(first.recorded["out"].isnan().any())
    assert "gave something else" not in caplog.text


def test_a_chunk_of_a_prompt_finds_the_state_of_the_chunks_before(nano: Path, tmp_path: Path) -> None:
    class Second:
        """Poisons the second chunk."""

        def bound(self, place: Place, decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
            if decision.call.op != "kda_prefill" or place.layer != 4:
                return fn
            site = Site(place, decision, Weights())

            def call(*args: Any, **kwargs: Any) -> Tensor:
                second = bool(site.named(args, kwargs)["has_state"].any())
                return _poison(fn(*args, **kwargs), torch.tensor([0] if second else [], dtype=torch.int64))

            return call

        def prepared(
            self, place: Place, decision: Decision, given: Mapping[str, Any], prepared: Mapping[str, Any]
        ) -> None:
            pass

    recorder, live = _recorder(tmp_path / "a"), _recorder(tmp_path / "b", "step:1", "kda_prefill")
    _run(nano, Second(), recorder, live, max_num_batched_tokens=5, max_num_seqs=2)
    case, ahead = load_case(recorder.files[0]), _in_layer(live, "kda_prefill", 4, 1)
    assert (case.op, case.origin["layer"], case.origin["step"], case.origin["repeats"]) == ("kda_prefill", 4, 1, True)
    assert bool(ahead.args["state"].any()), "the chunk before left no state"
    assert _same(case.args, ahead.args) and _same(case.recorded, ahead.recorded)


class _Caches:
    """Looks at the caches before and after the recorder between its two halves does."""

    def __init__(self) -> None:
        self.looks, self._before = 0, list[Tensor]()

    def bound(self, place: Place, decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    def prepared(self, place: Place, decision: Decision, given: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
        pass

    def stepping(self, step: Step) -> None:
        pass

    def stepped(self, step: Step, hidden: Tensor) -> None:
        self._before = [hidden.clone(), step.states.clone(), *(kv.clone() for kv in step.kv)]

    class After:
        def __init__(self, before: _Caches) -> None:
            self.half = before
            self.bound, self.prepared, self.stepping = before.bound, before.prepared, before.stepping

        def stepped(self, step: Step, hidden: Tensor) -> None:
            now = [hidden, step.states, *step.kv]
            assert all(map(same_bytes, now, self.half._before)), "the recorder left a trace"
            self.half.looks += 1


def test_three_sequences_that_come_and_go_do_not_notice(nano: Path, tmp_path: Path) -> None:
    fault = Long("mla_decode", 6, _poison)
    expected = _run(nano, fault, prompts=3, max_num_seqs=2)
    assert [len(tokens) for tokens, _ in expected] == [3, 10, 3], "the long ones fail, the short one ends"
    assert [error is None for _, error in expected] == [False, False, True]
    recorder, before = _recorder(tmp_path), _Caches()
    got = _run(nano, fault, before, recorder, _Caches.After(before), prompts=3, max_num_seqs=2)
    assert got == expected
    assert before.looks == recorder.step + 1
    cases = [load_case(path) for path in recorder.files]
    assert [(case.op, case.origin["layer"], case.origin["repeats"]) for case in cases] == [("mla_decode", 6, True)] * 2
    for case in cases:
        bad = case.recorded["out"].isnan().flatten(1).any(1)
        assert torch.equal(bad, case.args["seq_lens"] >= LENGTH)


def test_a_provider_that_differs_each_time_is_marked(
    nano: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, before = _recorder(tmp_path), _Caches()
    _run(nano, Long("kda_decode", 4, Noise()), before, recorder, _Caches.After(before))
    assert before.looks == recorder.step + 1, "what the repetition computed differently stayed in the caches"
    case = load_case(recorder.files[0])
    assert (case.op, case.origin["layer"], case.origin["step"], case.origin["repeats"]) == ("kda_decode", 4, 3, False)
    assert "step 3 gave something else when run again" in caplog.text


def test_a_fault_that_does_not_come_back_is_told_not_recorded(
    nano: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = _recorder(tmp_path)
    _run(nano, Long("kda_decode", 4, Once()), recorder)
    assert recorder.files == []
    assert "step 3 is not finite, but was when run again: when=step:3 records it" in caplog.text


def test_a_part_is_named_rather_than_the_whole(nano: Path, tmp_path: Path) -> None:
    recorder = _recorder(tmp_path, ops="kda_[dr]*")
    _run(nano, Long("kda_recurrent", 4, _poison), recorder, ops="kda_decode=composed")
    case = load_case(recorder.files[0])
    assert (case.op, case.origin["part_of"], case.origin["layer"]) == ("kda_recurrent", "kda_decode", 4)


def test_only_the_operators_asked_for_are_recorded(
    nano: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gates, none = _recorder(tmp_path, ops="sigmoid_gate"), _recorder(tmp_path, ops="kda_*")
    _run(nano, Long("mla_decode", 6, _poison), gates, none)
    case = load_case(gates.files[0])
    assert (case.op, case.origin["layer"], case.origin["step"]) == ("sigmoid_gate", 6, 3)
    assert none.files == []
    assert "step 3 is not finite, but no call of kda_* gave that" in caplog.text


def test_a_repetition_that_fails_is_told(nano: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fragile(out: Tensor, rows: Tensor) -> Tensor:
        if rows.any() and is_repetition():
            raise RuntimeError("out of something")
        return _poison(out, rows)

    recorder = _recorder(tmp_path)
    fault = Long("kda_decode", 4, fragile)
    assert _run(nano, fault, recorder, prompts=3) == _run(nano, fault, prompts=3)
    assert recorder.files == []
    assert "step 3 is not finite, but failed when run again" in caplog.text


def test_a_file_that_cannot_be_written_ends_recording_only(
    nano: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    recorder, fault = _recorder(tmp_path / "file"), Long("mla_decode", 6, _poison)
    assert _run(nano, fault, recorder, prompts=3) == _run(nano, fault, prompts=3)
    assert recorder.files == []
    assert caplog.text.count("recording stops") == 1


def test_repetitions_count_for_nobody_else(nano: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A shadow and a sampling recorder beside one that fires see what they see without it."""
    counts, samples = [], []
    fault = Long("mla_decode", 7, _poison)
    for index, firing in enumerate(([], [_recorder(tmp_path / "firing")])):
        shadow_figures.compared.clear()
        every = _recorder(tmp_path / str(index), "sample:1/3", "kda_decode")
        with caplog.at_level(logging.ERROR):
            _run(nano, fault, *firing, every, Shadow(parse_shadow("mla_decode:1/2")), prompts=3)
        counts.append(dict(shadow_figures.compared))
        samples.append([Path(name).name for name in every.files])
    shadow_figures.compared.clear()
    shadow_figures.diverged.clear()
    assert counts[0] == counts[1] and counts[0]["mla_decode"] > 0
    assert samples[0] == samples[1] != []

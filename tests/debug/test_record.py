"""Recording and shadowing a live model: what fires, what is written, and that the answer never changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from k3hal.cli import main
from k3hal.debug import shadow_figures
from k3hal.debug.capture import Site, Weights
from k3hal.debug.case_file import load_case
from k3hal.debug.check import check
from k3hal.debug.dump_spec import parse_dump
from k3hal.debug.record import Recorder, all_finite
from k3hal.debug.shadow import Shadow, parse_shadow
from k3hal.debug.target import Target
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.call import DimValue
from k3hal.dispatch.errors import UsageError
from k3hal.dispatch.observe import Observer, Place, observers, observing
from k3hal.dispatch.plan import OpRequest, make_plan
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator
from k3hal.dispatch.select import Decision
from k3hal.llm import LLM
from k3hal.model.write import write_preset
from k3hal.sampling_params import SamplingParams

from .faults import Fault

PROMPT = list(range(300, 312))
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "nano"
    write_preset("nano", target)
    return target


def _generate(nano: Path, *watching: Observer) -> list[int]:
    """Greedy tokens of a model built under these observers, the last one outermost."""
    if not watching:
        with LLM(nano, device="cpu", dtype="float32", memory_budget=1.0) as llm:
            return list(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)
    with observing(watching[0]):
        return _generate(nano, *watching[1:])


def _poisoned(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out[-1, 0] = torch.nan
    return out


def _scaled(out: torch.Tensor) -> torch.Tensor:
    return out * 1.5


def test_a_step_is_recorded_whole_and_replays(nano: Path, tmp_path: Path) -> None:
    recorder = Recorder(parse_dump(f"ops=*,when=step:1,dir={tmp_path}"))
    assert _generate(nano, recorder) == _generate(nano)
    cases = [load_case(path) for path in recorder.files]
    assert {case.origin["step"] for case in cases} == {1}
    assert {"kda_decode", "mla_decode", "latent_moe", "attn_res_mix", "mla_cache_insert"} <= {case.op for case in cases}
    assert sorted(c.origin["layer"] for c in cases if c.op == "mla_decode") == [3, 6, 7]
    for case in cases:
        operator = get_operator(case.op)
        assert set(case.recorded) == set(operator.outputs) - ({"residual"} if case.op == "rms_norm" else set())
        assert check(case, Target.reference(operator), expected=case.recorded, repeat=False).ok, case.id
    (first, *_) = (case for case in cases if case.op == "kda_decode")
    assert first.args["state"].shape[0] <= 3, "the case holds the whole arena"


def test_nonfinite_records_the_first_call_of_a_step_with_its_state_before(nano: Path, tmp_path: Path) -> None:
    recorder = Recorder(parse_dump(f"when=nonfinite,dir={tmp_path}"))
    _generate(nano, Fault("kda_decode", 4, _poisoned), recorder)
    case = load_case(recorder.files[0])
    assert (case.op, case.origin["layer"], case.origin["phase"], case.origin["step"]) == ("kda_decode", 4, "decode", 1)
    assert len({load_case(path).origin["step"] for path in recorder.files}) == len(recorder.files)
    assert bool(case.recorded["out"].isnan().any())
    # The state is the one before the call: the provider, run on it, gives the recorded state after.
    target = Target.decided(_decision("kda_decode", case.dims), "cpu")
    verdict = check(case, target, expected={"state": case.recorded["state"]}, repeat=False)
    assert verdict.ok, verdict
    assert not torch.equal(case.args["state"], case.recorded["state"])


def _decision(op: str, dims: Mapping[str, DimValue]) -> Decision:
    request = OpRequest(op, (0,), "decode", dims)
    plan = make_plan([request], build_selector(), model="m", device=probe("cpu"), dtype="float32")
    return plan.entries[0].decision


def test_nonfinite_does_not_fire_without_a_fault(nano: Path, tmp_path: Path) -> None:
    recorder = Recorder(parse_dump(f"when=nonfinite,dir={tmp_path}"))
    assert _generate(nano, recorder) == _generate(nano)
    assert recorder.files == []


def test_diverge_records_what_leaves_its_tolerance(nano: Path, tmp_path: Path) -> None:
    recorder = Recorder(parse_dump(f"ops=sigmoid_gate,when=diverge,dir={tmp_path}"))
    _generate(nano, Fault("sigmoid_gate", 7, _scaled), recorder)
    assert recorder.files
    assert {load_case(path).origin["layer"] for path in recorder.files} == {7}


def test_sampling_records_every_nth_call_and_stops_at_the_limit(
    nano: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(parse_dump(f"ops=mla_decode,when=sample:1/2,dir={tmp_path}"))
    _generate(nano, recorder)
    assert len(recorder.files) == 3
    with caplog.at_level(logging.WARNING):
        small = Recorder(parse_dump(f"ops=mla_decode,when=sample:1/1,dir={tmp_path},max_gb=1e-6"))
        _generate(nano, small)
    assert small.files == []
    assert "recording stops" in caplog.text


def test_nothing_armed_binds_the_providers_own_functions() -> None:
    assert observers() == ()
    request = OpRequest("sigmoid_gate", (0, 1), "any", {"dim": 64})
    plan = make_plan([request], build_selector(), model="m", device=probe("cpu"), dtype="float32")
    chosen = plan.entries[0].decision.chosen
    assert chosen is not None
    assert plan.bind().fn("sigmoid_gate", 1) is chosen.fn
    with observing(Recorder(parse_dump("ops=mla_*,when=nonfinite"))):
        assert plan.bind().fn("sigmoid_gate", 1) is chosen.fn
    with observing(Recorder(parse_dump("when=nonfinite"))):
        assert plan.bind().fn("sigmoid_gate", 1) is not chosen.fn


@pytest.fixture
def figures() -> Iterator[None]:
    shadow_figures.compared.clear()
    shadow_figures.diverged.clear()
    yield
    shadow_figures.compared.clear()
    shadow_figures.diverged.clear()


@pytest.mark.usefixtures("figures")
def test_shadowing_reports_and_never_touches_the_answer(nano: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert _generate(nano, Shadow(parse_shadow("mla_*"))) == _generate(nano)
        assert (shadow_figures.compared["mla_decode"], shadow_figures.diverged.total()) == (9, 0)
        assert "diverges" not in caplog.text
        _generate(nano, Fault("mla_decode", 6, _scaled), Shadow(parse_shadow("mla_decode:1/3")))
    assert shadow_figures.compared["mla_decode"] == 9 + 3
    assert shadow_figures.diverged == {"mla_decode": 1}
    assert "mla_decode (cpu." in caplog.text
    assert "in layer 6, decode: diverges from the reference" in caplog.text


def test_the_environment_arms(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3HAL_DUMP", f"ops=sigmoid_gate,when=step:0,dir={tmp_path}")
    _generate(nano)
    assert len(list(tmp_path.glob("*.k3case"))) == 3
    monkeypatch.setenv("K3HAL_DUMP", "when=later")
    with pytest.raises(UsageError, match="K3HAL_DUMP: when=later"):
        LLM(nano, device="cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no 'when'"),
        ("when", "'when' is not KEY=VALUE"),
        ("colour=red,when=nonfinite", "'colour=red' is not KEY=VALUE"),
        ("ops=kdaa_*,when=nonfinite", "no operator matches 'kdaa_*'"),
        ("when=step:x", "when=step:x"),
        ("when=sample:1/0", "when=sample:1/0"),
        ("when=sample:0.5", "when=sample:0.5"),
        ("when=nonfinite,max_gb=0", "max_gb=0"),
        ("when=nonfinite,max_gb=many", "max_gb=many"),
    ],
)
def test_a_malformed_dump_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_dump(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["none_*", "kda_*:0", "kda_*:2", "kda_*:x", "kda_*:1/0"])
def test_a_malformed_shadow_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="K3HAL_SHADOW"):
        parse_shadow(text)


def test_finite_sums_and_overflowing_ones() -> None:
    assert all_finite((torch.ones(3), torch.zeros(2, dtype=torch.int32), None))
    assert all_finite(torch.full((4,), 3e38))
    assert not all_finite(torch.tensor([1.0, torch.inf]))
    assert not all_finite((torch.ones(1), torch.tensor([torch.nan])))


def test_a_site_names_positional_and_default_arguments() -> None:
    decision = _decision("kda_decode", {"heads": 2, "head_dim": 128, "conv_width": 4, "bounded": True})
    site = Site(Place("kda_decode", 0, "decode"), decision, Weights())
    names = list(get_operator("kda_decode").parameters)
    assert list(site.named(range(len(names) - 1), {names[-1]: 9}).values()) == [*range(len(names) - 1), 9]


def test_the_verb_lists_its_files(nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.json").write_text("[300, 301, 302]")
    args = ["op", "dump", str(nano), "--prompt", str(tmp_path / "prompt.json"), "--device", "cpu", "--op", "mla_*"]
    args += ["--dir", str(tmp_path), "--max-tokens", "2", "--json"]
    assert main([*args, "--when", "step:0"]) == 0
    data = json.loads(capsys.readouterr()[0])
    assert (data["schema"], data["steps"], len(data["files"])) == ("k3hal.op_dump/1", 2, 6)
    with observing(Fault("mla_prefill", 3, _poisoned)):
        assert main([*args, "--when", "nonfinite"]) == 1
    assert load_case(json.loads(capsys.readouterr()[0])["files"][0]).op == "mla_prefill"
    assert main(["op", "dump", str(nano)]) == 4

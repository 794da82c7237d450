"""`op explain`: every provider's reasons, the line that decided, what a coarse operator is made of, MXFP4 paths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3hal.cli import main
from k3hal.debug.case import sample_case, samples_of
from k3hal.debug.case_file import save_case
from k3hal.dispatch import Call, DeviceDescription, Needs, No, Yes, provides
from k3hal.dispatch.describe import described_ids
from k3hal.dispatch.explain import explain
from k3hal.dispatch.mxfp4 import FEATURE, declared_path, is_mxfp4, path_of
from k3hal.dispatch.provider import Provider
from k3hal.dispatch.registry import default_registry, get_operator
from k3hal.dispatch.select import Consideration, Selector

Explain = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Explain:
    """`explained("kda_decode", "--device", "cpu")` -> exit code, parsed JSON."""
    monkeypatch.delenv("K3HAL_OPS", raising=False)

    def call(*args: str) -> tuple[int, dict[str, Any]]:
        code = main(["op", "explain", *args, "--json"])
        out, err = capsys.readouterr()
        assert out, err
        return code, json.loads(out)

    return call


@pytest.mark.parametrize("device", sorted(described_ids()))
def test_every_described_machine_is_explained(explained: Explain, device: str) -> None:
    code, data = explained("moe_experts_mxfp4", "--device", device)
    assert (code, data["op"]) == (0, "moe_experts_mxfp4")
    assert {c["provider"] for c in data["considered"]} == {p.id for p in default_registry().of("moe_experts_mxfp4")}
    assert all(c["accepted"] or c["reasons"] for c in data["considered"])
    assert data["mxfp4"]["path"] in ("native", "w4a16", "dequantised")
    assert data["mxfp4"]["why"]


def test_the_cpu_takes_the_w4a16_path_and_says_why_no_better_one(explained: Explain) -> None:
    data = explained("latent_moe", "--device", "cpu", "--dtype", "float32", "--shape", "expert_format=mxfp4")[1]
    assert (data["mxfp4"]["path"], data["decision"]["backend"]) == ("w4a16", "cpu")
    assert any(FEATURE in why for why in data["mxfp4"]["why"])
    plain = explained("latent_moe", "--device", "cpu", "--shape", "expert_format=bf16")[1]
    assert plain["mxfp4"] is None
    assert {c["mxfp4"] for c in plain["considered"]} == {None}


def test_a_composed_operator_is_explained_part_by_part(explained: Explain) -> None:
    data = explained("latent_moe", "--device", "cpu", "--ops", "latent_moe=composed")[1]
    assert data["decision"]["policy"] == "--ops: latent_moe=composed"
    assert data["mxfp4"] is None
    assert data["parts"]["moe_experts_mxfp4"]["mxfp4"]["path"] == "w4a16"
    linear = data["parts"]["linear"]
    chosen = linear["decision"]["provider"]
    assert next(c for c in linear["considered"] if c["provider"] == chosen)["accepted"]
    assert linear["decision"]["provider"] == data["decision"]["parts"]["linear"]["provider"]


def test_a_reference_that_stands_in_for_its_parts_names_them(explained: Explain) -> None:
    data = explained("kda_decode", "--device", "ascend_910b", "--ops", "kda_decode=reference")[1]
    assert data["decision"]["provider"] == "reference"
    assert set(data["parts"]) == set(get_operator("kda_decode").lowers_to)


def test_a_refusal_is_explained(explained: Explain) -> None:
    code, data = explained("rms_norm", "--device", "b200", "--ops", "rms_norm=cpu.rows")
    assert (code, data["decision"]) == (2, None)
    assert "--ops: rms_norm=cpu.rows cannot run" in data["refusal"]
    assert {c["provider"] for c in data["considered"]} == {p.id for p in default_registry().of("rms_norm")}


def test_a_case_is_explained_as_it_is(explained: Explain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operator = get_operator("kda_decode")
    case = sample_case(operator, next(samples_of(operator, names=("seven",), dtypes=("float32",))))
    file = save_case(case, tmp_path / "one.k3case")
    data = explained("kda_decode", "--device", "mi355x", "--case", str(file))[1]
    assert (data["dims"], data["dtype"], data["phase"]) == (dict(case.dims), "float32", "decode")
    for args, message in (
        (("rms_norm", "--case", str(file)), "is a case of kda_decode, not of rms_norm"),
        (("kda_decode", "--case", str(file), "--shape", "heads=1"), "--case has a shape"),
        (("kda_decode", "--case", str(tmp_path / "none.k3case")), "none.k3case"),
    ):
        assert main(["op", "explain", *args, "--device", "cpu"]) == 4
        assert message in capsys.readouterr().err


def test_a_plan_pins_what_is_explained(explained: Explain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert main(["op", "plan", "--device", "cpu", "--save", str(file)]) == 0
    capsys.readouterr()
    data = explained("kda_decode", "--device", "cpu", "--plan", str(file))[1]
    assert data["decision"]["policy"] == f"pinned by {file}"
    args = ("kda_decode", "--device", "cpu", "--plan", str(file))
    assert main(["op", "explain", *args, "--shape", "heads=7"]) == 4
    assert "no entry for kda_decode (decode) with these dims" in capsys.readouterr().err
    assert main(["op", "explain", *args, "--ops", "*=reference"]) == 4


B200 = DeviceDescription("b200", "nvidia", "sm_100", 100, features=frozenset({FEATURE}))
CALL = Call("moe_experts_mxfp4", B200, "bfloat16", dims={"experts": 12})


def _no(call: Call) -> No:
    return No(f"needs 16 experts, this has {call.dims['experts']}")


def test_needs_and_shapes_are_both_reasons_on_the_vendors_machines() -> None:
    provider = Provider("toy", "p", print, Needs(("nvidia",), min_arch=103), _no)
    assert len(provider.every_reason(CALL)) == 2
    other = Call("toy", DeviceDescription("mi355x", "amd", "gfx950", 950), "bfloat16", dims={"experts": 12})
    assert provider.every_reason(other) == ("needs vendor nvidia, this is amd",)


def test_a_question_about_shapes_that_needs_what_is_missing_is_said_to_have_failed() -> None:
    def crash(call: Call) -> Yes:
        raise KeyError("cutlass")

    provider = Provider("toy", "p", print, Needs(("nvidia",), features=("tmem",)), crash)
    assert "could not be asked about" in provider.every_reason(CALL)[1]
    with pytest.raises(KeyError):
        Provider("toy", "p", print, Needs(("nvidia",)), crash).every_reason(CALL)


def test_a_path_is_declared_plainly_or_by_call_and_checked() -> None:
    def by_call(call: Call) -> Any:
        return "native" if FEATURE in call.device.features else "w4a16"

    native = Provider("moe_experts_mxfp4", "native", print, mxfp4=by_call)
    assert declared_path(native, CALL) == "native"
    assert path_of(CALL, native, ()).why == (".native declares it",)
    silent = Provider("moe_experts_mxfp4", "silent", print)
    refused = Consideration("x.native", False, ("needs 16 experts, this has 12",))
    found = path_of(CALL, silent, [(native, refused)])
    assert found.path is None
    assert found.why[-1] == ".native is native: needs 16 experts, this has 12"
    with pytest.raises(ValueError, match="mxfp4 is 'w4a8', not one of native, w4a16, dequantised"):
        provides("moe_experts_mxfp4", name="p", mxfp4="w4a8")  # pyright: ignore[reportArgumentType]


def test_every_cpu_provider_of_mxfp4_weights_declares_its_path() -> None:
    for op, dims in (("moe_experts_mxfp4", {}), ("latent_moe", {"expert_format": "mxfp4"})):
        call = Call(op, B200, "bfloat16", dims=dims)
        assert is_mxfp4(call)
        cpu = [p for p in default_registry().of(op) if p.backend == "cpu"]
        assert cpu and all(declared_path(p, call) for p in cpu)


def test_explaining_chooses_what_selecting_does() -> None:
    selector = Selector(default_registry(), (), "warn")
    assert explain(CALL, selector).decision == selector.decide(CALL)

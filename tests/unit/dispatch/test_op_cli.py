"""`k3hal op`: pinned JSON, exit codes, and every mistake in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3hal.cli import main
from k3hal.dispatch.describe import described_ids
from k3hal.dispatch.registry import default_registry, operator_names
from k3hal.model.config import ModelConfig

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("op", "list")` -> exit code, stdout, stderr."""
    monkeypatch.delenv("K3HAL_OPS", raising=False)

    def call(*args: str) -> tuple[int, str, str]:
        code = main(list(args))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def _json(run: Run, *args: str, code: int = 0) -> Any:
    got, out, err = run(*args, "--json")
    assert got == code, err
    return json.loads(out)


def test_list_names_every_operator_with_its_providers(run: Run) -> None:
    data = _json(run, "op", "list", "--device", "cpu")
    assert (data["schema"], data["device"]) == ("k3hal.op_list/1", "cpu")
    assert [row["op"] for row in data["operators"]] == list(operator_names())
    listed = {p["provider"]: p for row in data["operators"] for p in row["providers"]}
    assert {p.id for p in default_registry().providers} == set(listed)
    assert all(p["available"] == (not p["reasons"]) for p in listed.values())


def test_list_answers_as_explain_does(run: Run) -> None:
    (listed,) = _json(run, "op", "list", "rms_norm", "--device", "cpu")["operators"]
    explained = _json(run, "op", "explain", "rms_norm", "--device", "cpu")["considered"]
    assert [(p["provider"], p["available"]) for p in listed["providers"]] == [
        (c["provider"], c["accepted"]) for c in explained
    ]
    assert any(p["provider"].startswith("triton.") and not p["available"] for p in listed["providers"])


def test_list_takes_operators_as_an_argument_too(run: Run) -> None:
    listed = (_json(run, "op", "list", *how, "--device", "cpu") for how in (("kda_*",), ("--op", "kda_*")))
    first, second = listed
    assert first == second and first["operators"]


def test_list_tells_why_a_machine_that_is_not_here_cannot(run: Run) -> None:
    rows = _json(run, "op", "list", "--device", "ascend-910b", "--op", "kda_*")["operators"]
    assert {row["op"] for row in rows} == {name for name in operator_names() if name.startswith("kda_")}
    cpu = [p for row in rows for p in row["providers"] if p["backend"] == "cpu"]
    assert all("needs vendor cpu, this is ascend" in p["reasons"] for p in cpu)
    assert run("op", "list", "--device", "cpu", "--op", "kda_decode")[1].startswith("kda_decode  ")


def test_probe(run: Run) -> None:
    here = _json(run, "op", "probe")["devices"]
    assert here[-1]["device"] == "cpu"
    assert here[-1]["memory_bytes"] > 0
    assert here[-1]["packages"]["torch"]
    (there,) = _json(run, "op", "probe", "--device", "gb300")["devices"]
    assert (there["present"], there["arch"], there["flops"]["fp4"]) == (False, "sm_103", 15e15)
    text = run("op", "probe", "--device", "gb300")[1]
    assert "288.0 GB" in text
    assert "Vendor claim" in text


@pytest.mark.parametrize("device", [name for name in described_ids() if name != "cpu"])
def test_the_full_size_model_is_planned_for_every_described_machine(run: Run, device: str) -> None:
    data = _json(run, "op", "plan", "--device", device)
    assert (data["schema"], data["device"], data["model"]) == ("k3hal.op_plan/1", device, "kimi-k3")
    keys = {"op", "layers", "phase", "provider", "backend", "level", "composed", "reference", "reasons"}
    assert all(keys <= set(entry) for entry in data["entries"])
    layers = {(e["op"], e["phase"]): e["layers"] for e in data["entries"]}
    assert (len(layers["kda_decode", "decode"]), len(layers["mla_decode", "decode"])) == (69, 24)
    assert layers["mla_decode", "decode"][-2:] == [91, 92]
    assert all(entry["backend"] not in ("cpu", "null") for entry in data["entries"])
    assert all(entry["reasons"] for entry in data["entries"])


def test_a_plan_is_saved_pinned_and_compared(run: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    whole = _json(run, "op", "plan", "--device", "cpu", "--save", file)
    pinned = _json(run, "op", "plan", "--device", "cpu", "--plan", file)
    assert [e["provider"] for e in pinned["entries"]] == [e["provider"] for e in whole["entries"]]
    assert pinned["policy"] == f"pinned by {file}"
    assert run("op", "plan", "--device", "cpu", "--diff", file)[:2] == (0, "no difference\n")
    code, out, _ = run("op", "plan", "--device", "cpu", "--ops", "*=reference", "--diff", file)
    assert code == 1
    assert "kda_decode (decode) in layers 0-2, 4-6" in out
    assert "-> reference" in out
    again = _json(run, "op", "plan", "--device", "cpu", "--tp", "8", "--save", file)
    assert [e["dims"]["heads"] for e in again["entries"] if e["op"] == "kda_decode"] == [12]
    code, _, err = run("op", "plan", "--device", "cpu", "--plan", file)
    assert code == 4
    assert "was made for heads=12, this model has heads=96" in err


@pytest.mark.parametrize("tp", ["1", "8"])
def test_rounded_activations_are_planned_with_their_operator(run: Run, tp: str) -> None:
    """And with the finer operators around it: the coarse one rounds nothing."""
    asked = ("--device", "b200", "--tp", tp)
    plain, rounded = (
        {e["op"]: e for e in _json(run, "op", "plan", *asked, *flags)["entries"]}
        for flags in ((), ("--expert-activations", "mxfp8"))
    )
    assert set(plain) - set(rounded) == {"latent_moe"} and set(rounded) - set(plain) == {"moe_experts_a8w4"}
    experts, dims = rounded["moe_experts_a8w4"], {"experts": 896, "top_k": 16, "activation": "situ", "hidden": 3584}
    assert experts["dims"] == dims | {"intermediate": 3072 // int(tp)} and experts["layers"] == list(range(1, 93))


def test_explain_knows_the_calls_of_rounded_activations(run: Run) -> None:
    told = _json(run, "op", "explain", "moe_experts_a8w4", "--device", "b200")
    assert told["dims"] == _json(run, "op", "explain", "moe_experts_mxfp4", "--device", "b200")["dims"]
    assert told["dims"]["experts"] == 896
    here = _json(run, "op", "explain", "moe_experts_a8w4", "--device", "cpu")
    assert (here["decision"]["provider"], here["mxfp4"]["path"]) == ("cpu.rounded", "dequantised")


def test_a_plan_prints_as_a_table(run: Run) -> None:
    code, out, _ = run("op", "plan", "--device", "mi355x")
    assert code == 0
    assert "kimi-k3 on mi355x" in out
    assert "kda_decode" in out
    assert out.splitlines()[-1].split()[1] == "entries:"


def test_strict_refuses_what_only_a_reference_can_run(run: Run) -> None:
    data = _json(run, "op", "plan", "--device", "h100", "--ops", "*=reference", "--fallback", "strict")
    assert all(entry["reference"] for entry in data["entries"])


def test_explain_asks_everyone_and_says_what_decided(run: Run) -> None:
    data = _json(run, "op", "explain", "kda_gate", "--device", "cpu", "--dims", "heads=6,head_dim=32")
    assert (data["schema"], data["op"], data["device"]) == ("k3hal.op_explain/1", "kda_gate", "cpu")
    assert (data["dims"]["heads"], data["dims"]["head_dim"], data["dims"]["conv_width"]) == (6, 32, 4)
    assert {c["provider"] for c in data["considered"]} == {p.id for p in default_registry().of("kda_gate")}
    assert data["decision"]["policy"]
    text = run("op", "explain", "kda_decode", "--device", "cpu", "--phase", "decode")[1]
    assert text.startswith("kda_decode  ")
    assert "\nkda_decode -> " in text
    forced = _json(run, "op", "explain", "kda_decode", "--device", "cpu", "--ops", "kda_decode=composed")
    assert set(forced["decision"]["parts"]) == {"causal_conv1d", "kda_gate", "kda_recurrent", "gated_rms_norm"}


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("list", "--device", "h10"), 4, "unknown device 'h10' (did you mean 'h100'?"),
        (("list", "--op", "kdaa_*"), 4, "no operator matches 'kdaa_*'"),
        (("list", "kda_*", "--op", "rms_norm"), 4, "both 'kda_*' and --op 'rms_norm'"),
        (("probe", "--device", "cuda:x"), 4, "device 'cuda:x' is not understood"),
        (("plan", "/no/such/model"), 4, "'/no/such/model' is neither a directory nor a config.json"),
        (("plan", "--dtype", "float16"), 4, "--dtype is 'float16' (it takes auto, bfloat16, float32)"),
        (("plan", "--kv-cache-dtype", "int8"), 4, "--kv-cache-dtype is 'int8' (it takes auto, bf16, fp8)"),
        (("plan", "--expert-activations", "fp8"), 4, "--expert-activations is 'fp8' (it takes auto, mxfp8)"),
        (
            ("plan", "random:kl-tiny", "--expert-activations", "mxfp8"),
            2,
            "needs experts in mxfp4, this model's are in bf16",
        ),
        (("plan", "--tp", "7"), 4, "--tp is 7 (it must divide the model's 96 heads)"),
        (("plan", "--tp", "0"), 4, "--tp is 0"),
        (("plan", "--fallback", "never"), 4, "unknown fallback policy 'never' (it is strict or warn)"),
        (("plan", "--ops", "kda_decode"), 4, "--ops: 'kda_decode' is not GLOB=NAME"),
        (("plan", "--ops", "kda_decod=cpu"), 4, "no operator matches 'kda_decod' (did you mean 'kda_decode'?)"),
        (("plan", "--plan", "/no/plan"), 4, "/no/plan: the plan cannot be read"),
        (("plan", "--plan", "/no/plan", "--ops", "*=reference"), 4, "--plan pins every provider"),
        (("explain", "kda_decod"), 4, "unknown operator 'kda_decod' (did you mean 'kda_decode'?)"),
        (("explain", "kda_decode", "--phase", "later"), 4, "--phase is 'later'"),
        (("explain", "kda_decode", "--dims", "heads"), 4, "--shape: 'heads' is not NAME=VALUE"),
        (("explain",), 4, "Missing argument 'OP'"),
        (("unheard-of",), 4, "No such command"),
    ],
)
def test_a_mistake_is_one_line_and_its_exit_code(run: Run, args: tuple[str, ...], code: int, message: str) -> None:
    device = () if "--device" in args or args[0] == "unheard-of" else ("--device", "cpu")
    got, out, err = run("op", *args, *device)
    assert (got, out) == (code, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_an_absent_device_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3hal.dispatch.probe_vendors.glob", lambda pattern: [])
    code, out, _ = run("op", "plan", "--device", "npu", "--json")
    assert code == 2
    assert json.loads(out)["errors"][0]["code"] == "unsupported"


def test_the_embedded_config_is_the_published_one(shared_data: Callable[[str], Path], repo: Path) -> None:
    embedded = ModelConfig.from_json(repo / "model" / "configs" / "kimi_k3.json")
    assert embedded == ModelConfig.from_json(shared_data("kimi_k3_config.json"))


def test_no_provider_has_the_name_of_another_backend() -> None:
    """`--ops OP=NAME` takes providers of that name before those of the backend."""
    registry = default_registry()
    names = set(registry.backends)
    assert not [p.id for op in operator_names() for p in registry.of(op) if p.name in names - {p.backend}]

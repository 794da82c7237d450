"""`op bench --model-only`: floors from published limits, for full-size calls that take no memory and run nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from k3hal.bench import outlines
from k3hal.bench.modelled import Floor, modelled_report, modelled_tables
from k3hal.bench.outlines import Outlines
from k3hal.cli import main
from k3hal.debug.case import sample_case
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.describe import describe
from k3hal.dispatch.operator import Sample
from k3hal.dispatch.registry import get_operator, operator_names

MI355X = {"bytes": 8.0e12, "bfloat16": 2516.6e12}


def _json(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> Any:
    assert main(["op", "bench", *args, "--model-only", "--json"]) == code
    return json.loads(capsys.readouterr()[0])


def _affordable(op: str) -> Sample:
    """A sample of full width that a CPU can make, or the first there is."""
    samples = list(get_operator(op).samples())
    return next((s for s in samples if "k3" in s.tags and "device" not in s.tags), samples[0])


@pytest.mark.parametrize("op", operator_names())
def test_an_outline_costs_what_the_sample_costs(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, sample = get_operator(op), _affordable(op)
    real = sample_case(operator, sample)
    monkeypatch.setattr(outlines, "MOST_REAL", 1 << 12)
    with Outlines():
        outlined = sample_case(operator, sample)
    # What is not drawn leaves other numbers for what is: other experts are chosen.
    drawn = {name: value for name, value in real.args.items() if name == "ids"}
    assert operator.cost(**{**outlined.args, **drawn}) == operator.cost(**real.args)
    for name, value in real.args.items():
        if isinstance(value, torch.Tensor):
            mine = outlined.args[name]
            assert (mine.shape, mine.stride(), mine.dtype) == (value.shape, value.stride(), value.dtype)


def test_what_is_large_takes_no_memory_and_spreads() -> None:
    with Outlines():
        large = torch.randn(1 << 30, 1 << 10, generator=torch.Generator())
        small = torch.randn(4, 4)
        assert large.is_meta and (large * 2).is_meta and large[0].is_meta and not small.is_meta
        large[large > 0] = torch.nan
        assert large.nonzero().shape == (0, 2) and not large[:0].is_meta
        with pytest.raises(RuntimeError, match="no values"):
            small.copy_(large[:4, :4])
        with pytest.raises(RuntimeError):
            large[0, 0].item()


@pytest.mark.parametrize(
    ("flops", "moved", "dtype", "seconds", "bound"),
    [
        (0.0, 8e6, "bfloat16", 1e-6, "memory"),
        (2516.6e6, 8.0, "bfloat16", 1e-6, "compute"),
        (2516.6e6, 8e6, "int3", 1e-6, "unknown"),
    ],
)
def test_the_longer_limit_binds(flops: float, moved: float, dtype: str, seconds: float, bound: str) -> None:
    floor = Floor.of(flops, moved, dtype, describe("mi355x"))
    assert floor.seconds == pytest.approx(seconds) and floor.bound == bound


def test_full_size_floors_of_a_chip_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    data = _json(capsys, "mla_decode,moe_experts_mxfp4,all_reduce", "--device", "mi355x")
    assert data["schema"] == "k3hal.op_bench_model/1" and data["modelled"] is True
    assert data["left_out"] == ["all_reduce"] and data["limits"]["bytes_per_s"] == MI355X["bytes"]
    rows = {row["case"]: row for row in data["results"]}
    long = rows["mla_decode-bench_128k_batch_64-bfloat16"]
    tokens = sum(131_072 - n for n in range(64))
    assert long["bytes"] > tokens * 576 * 2
    assert long["floor"] == long["bytes"] / MI355X["bytes"] and long["bound"] == "memory"
    assert long["provider"] == "triton.split_kv" and long["reference"] is False and long["level"] >= "E0"
    wide = rows["moe_experts_mxfp4-bench_ep8_4096-bfloat16"]
    assert wide["floor"] == wide["flops"] / MI355X["bfloat16"] and wide["bound"] == "compute"


def test_what_no_source_says_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = _json(capsys, "kda_decode", "--sample", "bench_heads_12_batch_1", "--device", "ascend-950")["results"]
    assert row["compute_seconds"] is None and row["bound"] == "unknown"
    assert row["floor"] == row["memory_seconds"] == row["bytes"] / 1.6e12
    (row,) = _json(capsys, "rms_norm", "--sample", "plain", "--dtype", "float32", "--device", "cpu")["results"]
    assert row["floor"] is None and row["bound"] == "unknown"


def test_every_table_says_that_it_is_modelled(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept, page = tmp_path / "model.json", tmp_path / "bench.md"
    saves = ["--save", str(kept), "--save", str(page)]
    assert main(["op", "bench", "latent_moe", "--device", "mi355x", "--model-only", *saves]) == 0
    shown = capsys.readouterr()[0]
    for text in (shown, page.read_text("utf-8")):
        assert "Operators on AMD Instinct MI355X, 288 GB, modelled" in text and "modelled floor us" in text
        assert "Modelled: nothing ran." in text and "AMD Instinct MI355X data sheet" in text
        assert "latent_moe composed: moe_experts_mxfp4 triton.grouped" in text
    assert json.loads(kept.read_text("utf-8"))["results"][0]["parts"]["rms_norm"]["provider"] == "triton.fused"


def test_a_refused_choice_is_said() -> None:
    operator = get_operator("rms_norm")
    selector = build_selector("rms_norm=nvidia", "warn")
    report = modelled_report("rms_norm", describe("mi355x"), [(operator, [_affordable("rms_norm")])], selector)
    assert report["results"][0]["provider"] is None
    (table,) = modelled_tables(report)
    assert table.rows[0][-1].startswith("nothing: ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("rms_norm", "--model-only", "--device", "mi35x"), "did you mean 'mi355x'?"),
        (("rms_norm", "--model-only", "--device", "mi355x", "--seconds", "0.5"), "--seconds does not go with"),
        (("rms_norm", "--model-only", "--device", "mi355x", "--provider", "triton"), "--provider does not go with"),
        (("rms_norm", "--model-only", "--device", "mi355x", "--sample", "nope"), "no sample of rms_norm matches"),
        (("x*", "--model-only", "--device", "mi355x"), "no operator matches 'x*'"),
        (("rms_norm", "--model-only", "--device", "mi355x", "--save", "a.txt"), "not a .json or .md file"),
        (("rms_norm", "--device", "mi355x"), "--model-only prints floors"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str) -> None:
    assert main(["op", "bench", *args]) == 4
    _, err = capsys.readouterr()
    assert message in err and len(err.splitlines()) == 1

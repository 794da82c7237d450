"""What `bench slice` reports; how fast anything is, no test asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from k3hal.bench import slice as bench_module
from k3hal.bench import slice_modelled, slice_times
from k3hal.bench.save import tables_of
from k3hal.bench.slice import SCHEMA, SliceBench
from k3hal.bench.slice_calls import CallRecorder
from k3hal.bench.slice_modelled import collectives, depth_seconds
from k3hal.bench.slice_work import Space, Work, decode_batches, prefill_batch
from k3hal.checkpoints import full_size_config
from k3hal.cli import main
from k3hal.debug.ceilings import Ceilings
from k3hal.dispatch.observe import must_see_every_call, observing
from k3hal.engine.build import build
from k3hal.engine.options import EngineOptions
from k3hal.errors import UsageError
from k3hal.model.config import ModelConfig
from k3hal.model.generated import GeneratedModel
from k3hal.model.k3 import K3Model
from k3hal.model.presets import preset_config
from k3hal.model.slice import slice_of

Run = Callable[..., tuple[int, str, str]]
FEW = ("--device", "cpu", "--dtype", "float32", "--seconds", "0.001", "--max-num-batched-tokens", "128")
MEMORY = ("--memory-budget", "0.08")
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 4096}
CEILINGS = Ceilings(bytes_per_s=1e9, flops_per_s=1e10, dtype="float32", threads=1)


def _nano_slice(layers: int = 4) -> GeneratedModel:
    """A slice of nano under the name of a full-size one, so that its whole is modelled."""
    config = replace(ModelConfig.from_json(preset_config("nano")), vocab_size=1250, moe_intermediate_size=128)
    return GeneratedModel.of(f"k3-slice:{layers}@tp2", slice_of(config, layers, 2, first=4))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "measure_ceilings", lambda *_: CEILINGS)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: str | Path) -> tuple[int, str, str]:
        code = main(["bench", "slice", *FEW, *MEMORY, *map(str, args)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def slice_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "resolve_model", lambda _: _nano_slice())


def _check_figure(figure: dict[str, Any]) -> None:
    assert figure["seconds"] > 0 and figure["floor"] > 0
    assert figure["ratio"] == pytest.approx(figure["seconds"] / figure["floor"])
    assert figure["floor"] >= max(figure["bytes"] / CEILINGS.bytes_per_s, figure["flops"] / CEILINGS.flops_per_s) * 0.99


@pytest.mark.usefixtures("slice_model")
def test_the_report_of_a_slice(bench: Run, tmp_path: Path) -> None:
    target, picture = tmp_path / "report.json", tmp_path / "times"
    sizes = ("--batch", "1,2", "--context", "130,512,1M", "--prefill", "150", "--engine-prompt", "5")
    code, out, err = bench(*sizes, "--json", "--save", target, "--plot", picture)
    report = json.loads(out)
    assert code == 0 and report["schema"] == SCHEMA
    assert report["plots"] == [f"{picture}.png", f"{picture}.svg"] and all(Path(p).is_file() for p in report["plots"])
    assert json.loads(target.read_text()) == {key: value for key, value in report.items() if key != "plots"}
    assert report["model"]["layers"] == {"kda": 2, "mla": 2} and "without collectives" not in report["model"]["notice"]
    fits = {(row["batch"], row["context"]): row["fits"] for row in report["decode"]}
    assert fits == {(b, c): c < 1 << 20 for c in (130, 512, 1 << 20) for b in (1, 2)}
    assert "decode 2 x 1048576: does not fit: needs" in err
    for row in report["decode"]:
        assert row["needs"] > report["model"]["weights"]
        if row["fits"]:
            assert list(row["layers"]) == ["kda", "mla", "ends"]
            for figure in (*row["layers"].values(), row["step"]):
                _check_figure(figure)
    first = report["decode"][0]["layers"]
    names = {kind: {part["operator"].split()[0] for part in first[kind]["operators"]} for kind in first}
    assert {"kda_decode", "linear", "latent_moe", "moe_route", "attn_res_mix"} <= names["kda"]
    assert {"mla_decode", "head_linear", "mla_cache_insert"} <= names["mla"] and "embed" in names["ends"]
    for figure in first.values():
        assert sum(p["floor"] for p in figure["operators"] if not p["part_of"]) == pytest.approx(figure["floor"])
    later = {part["operator"] for part in report["decode"][2]["layers"]["mla"]["operators"]}
    assert "mla_decode" in later and "kda_decode" not in later and "sigmoid_gate" not in later
    (prefill,) = report["prefill"]
    assert [chunk["context"] for chunk in prefill["chunks"]] == [0, 128]
    assert prefill["step"]["seconds"] == pytest.approx(sum(c["step"]["seconds"] for c in prefill["chunks"]))
    for row, batch in zip(report["engine"], (1, 2), strict=True):
        assert row["batch"] == batch and row["idle"] is None and row["step"]["min"] <= row["step"]["median"]
        assert row["tokens_per_s"] == pytest.approx(batch / row["step"]["median"])
        assert row["host"]["launch"] > 0 and row["prefill_tokens_per_s"] > 0
    assert [(row["batch"], row["context"]) for row in report["modelled"]] == [(1, 130), (2, 130), (1, 512), (2, 512)]
    for row in report["modelled"]:
        assert row["seconds"] == pytest.approx(sum(row["parts"].values()))
        assert row["parts"]["collectives"] == pytest.approx(188 * 12e-6)


def test_a_slice_without_attention_over_latents(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "resolve_model", lambda _: _nano_slice(2))
    sizes = ("--batch", "2", "--context", "300,1M", "--prefill", "150", "--no-operators", "--json")
    code, out, _ = bench(*sizes, "--engine-prompt", "150")
    report = json.loads(out)
    assert code == 0 and report["engine"][0]["prompt"] == 150
    assert [row["fits"] for row in report["decode"]] == [True, False], "a million tokens are beyond nano's positions"
    assert list(report["decode"][0]["layers"]) == ["kda", "ends"] and report["modelled"] == []


def test_tables_and_other_models(bench: Run) -> None:
    sizes = ("--batch", "2", "--context", "64", "--prefill", "", "--engine-prompt", "0", "--no-operators")
    code, out, _ = bench("random:nano", *sizes, "--markdown", "--cached-prefix", "64")
    assert code == 0 and "| prompt | first token ms | cached when it returns |" in out
    assert "| sequences | context | kda dense | kda | mla | ends | step | launch | tokens/s |" in out
    assert "MODELLED" not in out and "operators by themselves" not in out


def test_prompts_that_return_find_their_head_in_the_cache(bench: Run) -> None:
    sizes = ("--batch", "1", "--context", "64", "--prefill", "", "--engine-prompt", "0", "--no-operators")
    code, out, _ = bench("random:nano", *sizes, "--cached-prefix", "256,300", "--json")
    whole, partial = json.loads(out)["returning"]
    assert code == 0 and (whole["tokens"], partial["tokens"]) == (256, 300)
    assert whole["cached"] == 256 and 256 <= partial["cached"] <= 300
    for row in (whole, partial):
        assert 0 < row["first_token"]["min"] <= row["first_token"]["median"] <= row["first_token"]["max"]
        assert row["cold"] > 0


@pytest.mark.usefixtures("slice_model")
def test_what_the_limit_leaves_out_is_said(bench: Run) -> None:
    sizes = ("--batch", "1", "--context", "64", "--prefill", "64", "--engine-prompt", "0", "--limit", "0")
    code, out, err = bench(*sizes)
    assert code == 0 and out.count("left out: the time limit was over") == 2
    assert "decode 1 x 64: left out" in err and "prefill 64: left out" in err and "MODELLED" not in out


@pytest.mark.usefixtures("slice_model")
def test_the_modelled_table_says_what_it_is(bench: Run) -> None:
    sizes = ("--batch", "1", "--context", "64", "--prefill", "", "--engine-prompt", "0", "--no-operators")
    code, out, _ = bench(*sizes, "--collective-us", "20")
    assert code == 0 and "MODELLED, not measured" in out and "a collective taken as 20 us" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--batch", "0"), "--batch needs numbers of at least 1"),
        (("--batch", ""), "there is nothing to measure"),
        (("--context", "", "--prefill", ""), "there is nothing to measure"),
        (("--context", "4K"), "--context is '4K'"),
        (("--context", "-4"), "--context is '-4'"),
        (("--prefill", "8k,x"), "--prefill is '8k,x'"),
        (("--cached-prefix", "8k,x"), "--cached-prefix is '8k,x'"),
        (("--cached-prefix", "0"), "--cached-prefix needs numbers of at least 1"),
        (("--collective-us", "-1"), "--collective-us is -1"),
        (("--collective-us", "nan"), "--collective-us is nan"),
        (("--save", "x.txt"), "not a .json or .md file"),
        (("--plot", "nowhere/x"), "is not a directory"),
        (("--async-depth", "0"), "async_depth is 0"),
        (("k3-slice:4@tp5",), "5 ranks do not divide"),
        (("nothing",), "is not a directory"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_built(bench: Run, flags: tuple[str, ...], said: str) -> None:
    code, _, err = bench(*flags)
    assert code == 4 and said in err and "Traceback" not in err


def test_a_single_sequence_that_never_fits_is_refused_with_the_size(bench: Run) -> None:
    code, _, err = bench("k3-slice:9", "--memory-budget", "8", "--max-num-batched-tokens", "512")
    assert code == 2 and "the model does not fit" in err and "GB are missing" in err


def test_layers_are_run_as_the_model_runs_them() -> None:
    """The calls of all kinds together are those of a whole step, and every page and slot belongs to one sequence."""
    recorder = CallRecorder()
    with observing(recorder):
        built = build(_nano_slice(), EngineOptions(**OPTIONS, max_num_seqs=4, ops="latent_moe=composed"))
    model = built.runner.model
    assert isinstance(model, K3Model)
    with torch.inference_mode():
        space = Space.of(built.runner.arena, 4)
        (batch,) = decode_batches(space, 4, 300, 1, torch.Generator().manual_seed(0))
        work = Work(model, space, [batch])
        with recorder.recording(kept=False) as step:
            logits = work.steps()[0]()
        with recorder.recording(kept=True) as apart:
            for calls in work.kinds().values():
                for call in calls:
                    call()
    assert logits.shape == (4, 625) and logits.isfinite().all()
    assert sorted(call.label for call in step) == sorted(call.label for call in apart)
    parts = {call.label.split()[0] + " " + call.op for call in apart if call.part_of}
    assert "latent_moe: moe_experts_mxfp4" in parts and {part.split()[0] for part in parts} == {"latent_moe:"}
    assert any(call.label == "latent_moe" and call.provider == "composed" for call in apart)
    rows = [int(call.label.split()[-1].split("x")[0]) for call in step if call.op == "linear"]
    assert rows and not any(count % 16 for count in rows), "a rank's one head ends no product at an odd address"
    assert all(call.run is None for call in step) and all(call.run for call in apart)
    assert batch.decode is not None
    pages = batch.decode.page_table.flatten().tolist()
    assert len(set(pages)) == len(pages) and min(pages) >= 5 * built.runner.arena.layout.pages_per_slot
    assert batch.decode.slots.tolist() == [1, 2, 3, 4]
    assert (batch.kv_rows // 128 == batch.decode.page_table[:, 2]).all() and (batch.kv_rows % 128 == 299 % 128).all()
    built.engine.close()


def test_its_observer_does_not_keep_steps_out_of_graphs() -> None:
    with observing(CallRecorder()):
        assert not must_see_every_call()
        with observing(_Watcher()):
            assert must_see_every_call()


class _Watcher(CallRecorder):
    on_request = False


def test_a_prefill_s_rows_follow_its_page_table() -> None:
    built = build(_nano_slice(), EngineOptions(**OPTIONS, max_num_seqs=2))
    space = Space.of(built.runner.arena, 1)
    table = space.table(1, 1000, torch.Generator().manual_seed(0))
    batch = prefill_batch(space, 200, 300, table)
    expected = [int(table[0, at // 128]) * 128 + at % 128 for at in range(200, 500)]
    assert batch.kv_rows.tolist() == expected and batch.logit_rows.tolist() == [299]
    assert batch.prefill is not None and batch.prefill.has_state.tolist() == [True]
    assert space.holds(1, 1000) and not space.holds(2, 1000) and not space.holds(1, 1 << 30)
    built.engine.close()


def test_the_modelled_parts_follow_the_published_layout() -> None:
    whole = full_size_config()
    assert collectives(whole) == 188
    assert depth_seconds(whole, [0.0, *[1.0] * 8]) == 0
    # 12 layers of each depth but the last block's 9, twice a layer; attention of a block's first layer sees one less.
    mixes = [0.0, *(float(depth) for depth in range(1, 9))]
    attention = sum(max(-(-layer // 12), 1) - 1 for layer in range(93))
    assert depth_seconds(whole, mixes) == attention + sum(layer // 12 for layer in range(93)) + 7
    layers = {kind: {"seconds": seconds} for kind, seconds in (("kda", 1.0), ("mla", 2.0), ("ends", 5.0))}
    row = {"batch": 2, "context": 8, "layers": layers}
    extras = ({"seconds": 0.25, "experts": 0.75}, [0.0, *[1.0] * 8])
    made = slice_modelled._whole(whole, row, extras, 1e6)
    assert made["seconds"] == pytest.approx(69 + 24 * 2 - 0.5 + 5 + 188) and made["tokens_per_s"] * made["seconds"] == 2


def test_a_report_without_what_was_left_out_has_no_empty_tables() -> None:
    empty = {"decode": [], "prefill": [], "engine": [], "modelled": []}
    assert tables_of({"schema": SCHEMA, **empty}) == []


def test_settings_know_their_limits() -> None:
    with pytest.raises(UsageError, match="--prefill needs numbers of at least 1"):
        SliceBench(prefill=(0,))
    assert slice_times._EVICTED_BYTES <= slice_times.FLUSHED_BYTES

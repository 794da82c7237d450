"""What `bench engine` reports; how fast anything is, no test asks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from k3hal.bench import engine
from k3hal.bench.ours import Ours
from k3hal.bench.peer import load_peer
from k3hal.bench.runs import Contender, Run
from k3hal.bench.steps import PARTS
from k3hal.engine.build import build_engine
from k3hal.errors import UnsupportedError, UsageError

Bench = Callable[..., tuple[int, str, str]]


class Faulty:
    """A peer that answers as the real one but for one token of the last prompt."""

    name = "transformers"

    def __init__(self, peer: Contender) -> None:
        self._peer = peer

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Run:
        run = self._peer.run(prompts, num_tokens)
        run.tokens[-1][3] ^= 1
        return run


@pytest.fixture
def faulty_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "load_peer", lambda *args: Faulty(load_peer(*args)))


def test_the_report_beside_transformers(kimi_linear_dir: Path, bench: Bench, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    args = ("--peer", "transformers", "--concurrency", "1,3", "--json", "--save", target)
    code, out, err = bench("engine", kimi_linear_dir, *args)
    report = json.loads(out)
    assert code == 0 and report["schema"] == "k3hal.bench_engine/1"
    assert json.loads(target.read_text()) == report
    assert report["outputs_equal"] is True
    assert report["model"]["name"] == "kl-micro" and report["dtype"] == "float32"
    assert report["settings"]["prompt_tokens"] == 5 and report["versions"]["transformers"]
    assert {"moe_experts", "kda_decode"} <= set(report["providers"])
    assert "run 2 of 2" in err
    for result, concurrency in zip(report["results"], (1, 3), strict=True):
        assert result["concurrency"] == concurrency and result["difference"] is None
        for name in ("ours", "peer"):
            rate = result[name]["decode_tokens_per_s"]
            assert 0 < rate["min"] <= rate["median"] <= rate["max"]
            floor_rate = result["floor"]["tokens_per_s"]
            assert result[name]["floor_share"] == pytest.approx(rate["median"] / floor_rate)
            assert result[name]["ttft"]["min"] > 0 and result[name]["prefill_tokens_per_s"]["min"] > 0
        assert 0 < result["ratio"]["min"] <= result["ratio"]["median"] <= result["ratio"]["max"]


@pytest.mark.usefixtures("faulty_peer")
def test_no_ratio_is_printed_where_outputs_differ(kimi_linear_dir: Path, bench: Bench) -> None:
    args = ("engine", kimi_linear_dir, "--peer", "transformers", "--concurrency", "2")
    code, out, err = bench(*args, "--json")
    report = json.loads(out)
    (result,) = report["results"]
    assert code == 1 and report["outputs_equal"] is False and result["ratio"] is None
    assert (result["difference"]["prompt"], result["difference"]["position"]) == (1, 3)
    assert "outputs differ: prompt 1, output token 3" in err
    code, out, _ = bench(*args)
    assert code == 1 and "No ratio at concurrency 2: outputs differ from output token 3 of prompt 1 on" in out


def test_a_wrong_weight_shows_as_a_difference(kimi_linear_dir: Path) -> None:
    built = build_engine(str(kimi_linear_dir), dtype="float32", max_model_len=128)
    peer = load_peer("transformers", kimi_linear_dir, torch.float32)
    prompts = engine.draw_prompts(2, 9, built.tokenizer.special_base, 0)
    right = peer.run(prompts, 5).tokens
    with torch.inference_mode():
        built.runner.model.embedding.mul_(-1)  # pyright: ignore[reportAttributeAccessIssue]
    ours = Ours(built)
    assert ours.run(prompts, 5).tokens != right
    with torch.inference_mode():
        ours._model.embedding.mul_(-1)  # pyright: ignore[reportAttributeAccessIssue]
    assert ours.run(prompts, 5).tokens == right


def test_the_breakdown_adds_up(k3_dir: Path, bench: Bench) -> None:
    code, out, _ = bench("engine", k3_dir, "--concurrency", "2", "--json")
    (result,) = json.loads(out)["results"]
    parts = result["breakdown"]
    assert code == 0 and result["peer"] is None and result["ratio"] is None
    assert sum(parts["share"].values()) == pytest.approx(1)
    assert set(parts["share"]) == set(parts["seconds"]) == set(PARTS)
    both = parts["share"]["scheduling"] + parts["share"]["batch"]
    assert parts["scheduling_and_batch_share"] == pytest.approx(both)
    assert parts["steps"] == 2 * 5  # two runs, and the first of six tokens comes from the prefill


def test_the_breakdown_is_printed_when_asked_for(k3_dir: Path, bench: Bench) -> None:
    assert "parts of a decode step" not in bench("engine", k3_dir, "--concurrency", "1")[1]
    assert "parts of a decode step" in bench("engine", k3_dir, "--concurrency", "1", "--breakdown")[1]


def test_more_requests_than_one_step_prefills_are_measured_while_all_decode(k3_dir: Path) -> None:
    built = build_engine(str(k3_dir), dtype="float32", max_num_batched_tokens=64, max_model_len=128)
    run = Ours(built).run(engine.draw_prompts(4, 30, 300, 0), 8)
    assert run.decode_tokens % 4 == 0 and 0 < run.decode_tokens < 4 * 7
    assert [len(tokens) for tokens in run.tokens] == [8] * 4
    assert run.first_tokens[0] < run.first_tokens[3]


def test_transformers_is_refused_for_what_it_cannot_run(k3_dir: Path, bench: Bench) -> None:
    code, out, err = bench("engine", k3_dir, "--peer", "transformers", "--json")
    assert code == 2 and json.loads(out)["errors"][0]["code"] == "unsupported"
    assert "Kimi-Linear checkpoints only" in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_experts": 7}, "does not load .*mismatch"), ({"num_hidden_layers": 4}, "cleanly: missing_keys")],
)
def test_transformers_is_refused_where_it_would_invent_weights(
    changes: dict[str, int], message: str, kimi_linear_dir: Path, tmp_path: Path
) -> None:
    for path in kimi_linear_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    config["linear_attn_config"]["full_attn_layers"] = list(range(3, config["num_hidden_layers"] + 1))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=message):
        load_peer("transformers", tmp_path, torch.float32)


BAD = [
    (("--concurrency", "0"), "--concurrency needs numbers of at least 1"),
    (("--concurrency", "1,x"), "--concurrency is '1,x'"),
    (("--concurrency", ""), "--concurrency is ''"),
    (("--output-tokens", "1"), "--output-tokens is 1"),
    (("--prompt-tokens", "0"), "--prompt-tokens is 0"),
    (("--repeat", "0"), "--repeat is 0"),
    (("--peer", "llama.cpp"), "unknown peer 'llama.cpp'"),
    (("--save", "report.txt"), "not a .json or .md file"),
    (("--save", "no/such/folder/report.json"), "is not a directory"),
    (("--dtype", "float16"), "dtype is 'float16'"),
]


@pytest.mark.parametrize(
    ("args", "message"), BAD, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_bad_flags_give_one_line(args: tuple[str, ...], message: str, kimi_linear_dir: Path, bench: Bench) -> None:
    code, out, err = bench("engine", kimi_linear_dir, *args)
    assert code == 4 and out == ""
    assert message in err.splitlines()[-1]


def test_sizes_without_a_full_decode_step_are_refused(k3_dir: Path) -> None:
    built = build_engine(str(k3_dir), dtype="float32", max_num_batched_tokens=64, max_model_len=128)
    with pytest.raises(UsageError, match="no step decodes all 4 sequences at once"):
        Ours(built).run(engine.draw_prompts(4, 60, 300, 0), 2)

"""What is seen of a worker: the plan once, recorded and shadowed calls, and figures that another process reads."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from k3hal.debug import shadow_figures
from k3hal.debug.case_file import load_case
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.plan import DispatchPlan, OpRequest, make_plan
from k3hal.dispatch.plan_file import plan_json
from k3hal.dispatch.probe import probe
from k3hal.errors import UsageError
from k3hal.vllm import figures, observe
from k3hal.vllm.collect import Served, WorkerFigures
from k3hal.vllm.observe import EXTENSION, WorkerExtension, WorkerPlace, WorkerWatch, check_asked, extend_worker

PLACE = WorkerPlace("abc12", 0, 0, 1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(observe, "_watch", None)
    shadow_figures.compared.clear()
    shadow_figures.diverged.clear()
    yield
    shadow_figures.compared.clear()
    shadow_figures.diverged.clear()


def plan() -> DispatchPlan:
    requests = [OpRequest("sigmoid_gate", (0, 1), "any", {"dim": 64})]
    return make_plan(requests, build_selector(), model="m", device=probe("cpu"), dtype="float32")


def call(watch: WorkerWatch, value: float = 1.0, steps: int = 1) -> None:
    gate = watch.bind().fn("sigmoid_gate", 1)
    for _ in range(steps):
        with watch.step(3):
            gate(torch.full((3, 64), value), torch.zeros(3, 64))


def metrics(*served: Served) -> str:
    registry, collector = CollectorRegistry(), WorkerFigures()
    collector.served += served
    registry.register(collector)
    return generate_latest(registry).decode()


def test_the_plan_is_printed_by_one_worker(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.k3hal"):
        for engine, rank in ((0, 0), (0, 1), (1, 0)):
            WorkerWatch(plan(), WorkerPlace("abc12", engine, rank, 2), {})
    (record,) = caplog.records
    assert "sigmoid_gate" in record.getMessage() and plan().entries[0].decision.provider in record.getMessage()


def test_counts_reach_the_metrics_of_another_process() -> None:
    watch = WorkerWatch(plan(), PLACE, {"K3HAL_SHADOW": "sigmoid_*"})
    call(watch, steps=4)
    text = metrics(Served("abc12", 0, "tiny"), Served("other", 0, "tiny"))
    labels = 'engine="0",model_name="tiny",rank="0"'
    assert "k3hal_engine_steps_total{" + labels + "} 4.0" in text
    assert "k3hal_engine_step_tokens_total{" + labels + "} 12.0" in text
    assert 'k3hal_shadow_compared_total{engine="0",model_name="tiny",op="sigmoid_gate",rank="0"} 4.0' in text
    assert 'k3hal_shadow_diverged_total{engine="0",model_name="tiny",op="sigmoid_gate",rank="0"} 0.0' in text
    (layers,) = [line for line in text.splitlines() if line.startswith("k3hal_plan_layers{")]
    assert 'op="sigmoid_gate"' in layers and layers.endswith(" 2.0")
    code = "from k3hal.vllm.figures import read_instance;print([f.values['steps'] for f in read_instance('abc12', 0)])"
    assert (
        subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
        == "[4.0]\n"
    )


def test_entries_of_one_provider_are_counted_together() -> None:
    requests = [OpRequest("sigmoid_gate", layers, "any", {"dim": dim}) for layers, dim in (((0, 1), 64), ((2,), 32))]
    made = make_plan(requests, build_selector(), model="m", device=probe("cpu"), dtype="float32")
    call(WorkerWatch(made, PLACE, {}))
    text = metrics(Served("abc12", 0, "tiny"))
    (layers,) = [line for line in text.splitlines() if line.startswith("k3hal_plan_layers{")]
    assert layers.endswith(" 3.0")


def test_a_board_goes_with_its_process() -> None:
    board = figures.Board(figures.figures_file("abc12", 0, 0), ["steps"], {})
    board.close()
    board.close()
    assert list(figures.figures_folder().iterdir()) == []


def test_without_workers_there_are_no_metrics() -> None:
    assert metrics(Served("abc12", 0, "tiny")) == ""


def headed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x08", b"\xff" * 64, headed(b"{}" + b" " * 14), headed(b'{"pid": 1%s}' % (b"0" * 30)),
        headed(b"[" * 200_000), headed(b'{"pid": 1%s}' % (b"0" * 5000)),
    ],
)  # fmt: skip
def test_a_file_that_is_no_board_is_no_worker(data: bytes) -> None:
    file = figures.figures_file("abc12", 0, 0)
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    assert list(figures.read_instance("abc12", 0)) == []
    figures.sweep()
    assert file.exists()


def test_boards_of_dead_workers_are_swept() -> None:
    made = "from k3hal.vllm.figures import *; Board(figures_file('gone1', 0, 0), ['steps'], {})"
    subprocess.run([sys.executable, "-P", "-c", made], check=True)
    call(WorkerWatch(plan(), PLACE, {}))
    assert [file.name for file in figures.figures_folder().iterdir()] == ["abc12-0-0.figures"]


def test_a_cache_that_cannot_be_written_costs_only_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "vllm.k3hal"):
        watch = WorkerWatch(plan(), PLACE, {})
    call(watch)
    assert "no k3hal_* figures" in caplog.text and watch.figures()["steps"] == 1


def test_what_is_not_finite_is_recorded_in_the_step_it_comes_in(tmp_path: Path) -> None:
    watch = WorkerWatch(plan(), PLACE, {"K3HAL_DUMP": f"when=nonfinite,dir={tmp_path / 'd'}"})
    call(watch, steps=2)
    assert watch.figures()["dumped"] == 0
    call(watch, float("nan"))
    (file,) = (tmp_path / "d").iterdir()
    case = load_case(file)
    assert (case.op, case.origin["step"], case.origin["layer"]) == ("sigmoid_gate", 2, 1)
    assert watch.figures()["dumped"] == 1


def test_ranks_record_in_folders_of_their_own(tmp_path: Path) -> None:
    for rank in (0, 1):
        call(WorkerWatch(plan(), WorkerPlace("abc12", 0, rank, 2), {"K3HAL_DUMP": f"when=step:0,dir={tmp_path / 'd'}"}))
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["rank0", "rank1"]
    assert all(len(list(path.iterdir())) == 1 for path in (tmp_path / "d").iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [("K3HAL_DUMP", "when=often"), ("K3HAL_SHADOW", "nothing_like_it"), ("K3HAL_OPS", "nothing_like_it=triton")],
)
def test_a_malformed_variable_is_refused_before_there_are_workers(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        check_asked({name: value})
    check_asked({"K3HAL_OPS": "rms_norm=reference", "K3HAL_DUMP": "when=diverge", "K3HAL_SHADOW": "rms_*:0.1"})
    check_asked({})


def test_a_worker_answers_for_its_plan() -> None:
    worker = WorkerExtension()
    with pytest.raises(UsageError, match="runs no model"):
        worker.k3hal_plan()
    made = plan()
    call(WorkerWatch(made, PLACE, {}))
    assert worker.k3hal_plan() == plan_json(made)
    assert worker.k3hal_figures() == {"steps": 1, "tokens": 3, "dumped": 0}
    head, *answers = worker.k3hal_explain("sigmoid_gate")
    assert made.entries[0].decision.provider in head and any(" Yes" in line for line in answers)
    with pytest.raises(UsageError, match="no operator kda_decode"):
        worker.k3hal_explain("kda_decode")


def test_an_extension_of_the_users_own_stays() -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=""))
    extend_worker(config)
    assert config.parallel_config.worker_extension_cls == EXTENSION
    config.parallel_config.worker_extension_cls = "mine.Extension"
    extend_worker(config)
    assert config.parallel_config.worker_extension_cls == "mine.Extension"


def test_the_place_is_vllms() -> None:
    parallel = SimpleNamespace(data_parallel_rank=1, tensor_parallel_size=4)
    config = SimpleNamespace(instance_id="x", parallel_config=parallel)
    assert WorkerPlace.of(config, 3) == ("x", 1, 3, 4)

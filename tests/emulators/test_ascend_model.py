"""Small models through the Ascend plan, over emulators of its libraries, against the same on references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from k3hal.backends.ascend import npu_mla
from k3hal.conform.end_to_end import compare_logits
from k3hal.conform.models import CAPS
from k3hal.debug.drive import Driver
from k3hal.dispatch.describe import describe
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.host_lengths import lengths_of, told
from k3hal.dispatch.probe import probe
from k3hal.dispatch.runtime import DeviceRuntime, runtime_for
from k3hal.engine import build
from k3hal.engine.build import build_engine
from k3hal.llm import LLM
from k3hal.model.write import write_preset
from k3hal.sampling_params import SamplingParams

from ..engine.closure_runtime import ClosureRuntime
from ..modelslim_files import write_slim
from .ascend_ops import EMULATORS
from .torch_ops import registered

IDS = np.random.default_rng(0).integers(0, 300, 140).tolist()
"""More than two chunks of KDA and one page of MLA."""
DECODES, DRAFTED = 6, 3


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`pretend(name)`: the device `npu` is that described machine, with its tensors on the CPU."""

    def be(name: str) -> None:
        machine = replace(describe(name), id="npu:0", present=True, torch_device="cpu")

        def found(device: str = "auto") -> DeviceDescription:
            return machine if device == "npu" else probe(device)

        def runtime(device: DeviceDescription) -> DeviceRuntime:
            return runtime_for(probe("cpu") if device is machine else device)

        monkeypatch.setattr(build, "probe", found)
        monkeypatch.setattr(build, "runtime_for", runtime)

    return be


def _logits(folder: Path, device: str, ops: str | None) -> tuple[torch.Tensor, dict[str, str]]:
    built = build_engine(
        str(folder), device=device, dtype="bfloat16", ops=ops, max_num_seqs=2, max_model_len=512, draft="ngram:4",
        fallback="warn",
    )  # fmt: skip
    try:
        chosen = {entry.request.op: entry.decision.provider for entry in built.plan.entries}
        logits = Driver(built.runner).run(IDS, DECODES, lambda _: None, moved=True, drafted=DRAFTED)
    finally:
        built.engine.close()
    return logits, chosen


@pytest.mark.parametrize("preset", ["nano", "kl-tiny"])
@pytest.mark.parametrize(
    ("machine", "decoding"), [("ascend_910c", "ascend.sparse_flash"), ("ascend_950", "ascend.fused_infer")]
)
def test_a_model_gives_the_references_logits(
    tmp_path: Path, pretend: Callable[[str], None], preset: str, machine: str, decoding: str
) -> None:
    folder = tmp_path / preset
    write_preset(preset, folder, seed=0)
    good, _ = _logits(folder, "cpu", "*=reference")
    pretend(machine)
    with registered(EMULATORS) as called:
        logits, chosen = _logits(folder, "npu", None)
    judged = compare_logits(logits, good, CAPS["bfloat16"])
    assert judged["status"] == "Pass", judged
    assert chosen["mla_decode"] == decoding and chosen["kda_decode"] == "ascend.vllm_ascend"
    assert all(name.startswith("ascend.") or name == "composed" for name in chosen.values()), chosen
    assert {"recurrent_kda", "chunk_kda_fwd", "npu_fused_infer_attention_score", "npu_rms_norm"} <= set(called)


def test_a_model_of_modelslims_gives_the_references_logits(tmp_path: Path, pretend: Callable[[str], None]) -> None:
    folder = write_slim(tmp_path / "slim")
    good, _ = _logits(folder, "cpu", "*=reference")
    pretend("ascend_910c")
    with registered(EMULATORS) as called:
        logits, chosen = _logits(folder, "npu", None)
    judged = compare_logits(logits, good, CAPS["bfloat16"])
    assert judged["status"] == "Pass", judged
    assert chosen["latent_moe"] == "composed" and "npu_grouped_matmul" in called


def test_the_engine_tells_a_graph_the_lengths_that_the_device_has(
    tmp_path: Path, pretend: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of several lengths through graphs of the 950, whose attention takes lengths as a list."""
    runtimes: list[ClosureRuntime] = []
    listed: list[list[int]] = []

    def runtime_of(device: DeviceDescription) -> DeviceRuntime:
        runtimes.append(ClosureRuntime(device))
        return runtimes[-1]

    def lists(seq_lens: torch.Tensor, part: slice) -> list[int]:
        found = lengths_of(seq_lens, part)
        assert found == seq_lens[part].tolist()
        if told():
            listed.append(found)
        return found

    write_preset("nano", tmp_path / "nano", seed=0)
    pretend("ascend_950")
    monkeypatch.setattr(build, "runtime_for", runtime_of)
    monkeypatch.setattr(npu_mla, "lengths_of", lists)
    sizes = {"dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 4}
    prompts = [[3 + i] * (5 + 7 * i) for i in range(3)]
    answers = []
    for graphs in (False, True):
        with registered(EMULATORS), LLM(tmp_path / "nano", device="npu", graphs=graphs, **sizes) as model:
            outputs = model.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        answers.append([one.token_ids for output in outputs for one in output.outputs])
    assert [bool(runtime.captured) for runtime in runtimes] == [False, True]
    assert answers[0] == answers[1] and [6, 13, 20, 0] in listed, listed

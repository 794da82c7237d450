"""Dispatch and debugging inside a vLLM worker, and the tokenizer of a Kimi-Linear without tokenizer code."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3hal.debug.case_file import load_case
from k3hal.model.write import write_preset
from k3hal.serve.chat_prompt import render_chat
from k3hal.tokenizer import Tokenizer

from .ask import CHAT

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: `make test-vllm` has it"
    ),
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def answer(folder: Path) -> Any:
    write_preset("kl-tiny", folder / "kl-tiny", seed=0)
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "K3HAL_OPS": "rms_norm=reference",
        "K3HAL_SHADOW": "mla_decode",
        "K3HAL_DUMP": f"ops=kda_decode,when=step:2,dir={folder / 'dump'}",
    }
    driver = Path(__file__).with_name("ask.py")
    ran = subprocess.run(
        [sys.executable, "-P", str(driver), str(folder / "kl-tiny"), str(folder / "answer.json")],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    return json.loads((folder / "answer.json").read_text())


def test_its_prompts_are_k3hals(folder: Path, answer: Any) -> None:
    tokenizer = Tokenizer.from_dir(folder / "kl-tiny")
    assert answer["chat"] == render_chat({"messages": CHAT}).ids(tokenizer)
    assert answer["text"] == [*tokenizer.encode_ordinary("Hi"), tokenizer.special("<|sep|>")]
    shown = [i for i in answer["tokens"] if not tokenizer.is_special(i)]
    assert answer["said"].startswith(tokenizer.decode(shown[:1]).strip("\ufffd"))


def test_overrides_are_obeyed_and_explained(answer: Any) -> None:
    (plan,), (explained,) = answer["plan"], answer["explained"]
    assert {entry["provider"] for entry in plan["entries"] if entry["op"] == "rms_norm"} == {"reference"}
    assert "rms_norm" in explained[0] and "-> reference" in explained[0]


def test_calls_are_shadowed_and_recorded(folder: Path, answer: Any) -> None:
    (figures,) = answer["figures"]
    assert figures["steps"] >= 24 and figures["shadow_compared/mla_decode"] > 0
    assert figures["shadow_diverged/mla_decode"] == 0
    files = sorted((folder / "dump").iterdir())
    assert len(files) == figures["dumped"] > 1
    assert {load_case(file).origin["step"] for file in files} == {2}
    assert {load_case(file).op for file in files} == {"kda_decode"}

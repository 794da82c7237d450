"""That the end-to-end check depends on what it says it proves: page copies and drawn tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from k3hal.conform.end_to_end import compare_logits, drawn_wrong
from k3hal.conform.models import CAPS
from k3hal.debug.drive import Driver
from k3hal.dispatch.registry import get_operator
from k3hal.engine.build import BuiltEngine, build_engine
from k3hal.engine.runner import ModelRunner
from k3hal.model.write import write_preset

IDS = np.random.default_rng(0).integers(0, 300, 140).tolist()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuiltEngine]:
    folder: Path = tmp_path_factory.mktemp("checkpoints") / "nano"
    write_preset("nano", folder, seed=0)
    built = build_engine(str(folder), device="cpu", dtype="float32", max_num_seqs=2, max_model_len=512, draft="ngram:4")
    yield built
    built.engine.close()


@pytest.fixture(scope="module")
def driver(built: BuiltEngine) -> Driver:
    return Driver(built.runner)


def test_a_sequence_that_was_moved_goes_on_as_before(driver: Driver) -> None:
    stayed = driver.run(IDS, 6, lambda _: None)
    moved = driver.run(IDS, 6, lambda _: None, moved=True)
    assert compare_logits(moved, stayed, CAPS["float32"])["status"] == "Pass"


def test_drafts_leave_what_decoding_leaves(built: BuiltEngine, driver: Driver) -> None:
    stages: list[str] = []
    stayed = driver.run(IDS, 6, lambda _: None)
    drafted = driver.run(IDS, 6, stages.append, moved=True, drafted=3)
    assert stages == ["prefill", "verify", "decode", "decode"]
    assert compare_logits(drafted, stayed, CAPS["float32"])["status"] == "Pass"


def test_a_draft_too_many_shows_in_the_logits(
    built: BuiltEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    stayed = driver.run(IDS, 6, lambda _: None)
    commit = built.runner.model.commit  # pyright: ignore[reportAttributeAccessIssue] - the model verifies drafts
    monkeypatch.setattr(built.runner.model, "commit", lambda batch, cache, kept: commit(batch, cache, kept + 1))
    judged = compare_logits(driver.run(IDS, 6, lambda _: None, drafted=3), stayed, CAPS["float32"])
    assert judged["status"] == "Fail" and "kl_max" in judged["problem"]


def test_pages_that_are_not_copied_show_in_the_logits(built: BuiltEngine, driver: Driver) -> None:
    runner = built.runner
    lazy = ModelRunner(
        runner.model, runner.arena, built.runner._sampler, built.plan.bind().fn("step_metadata"), _nothing
    )
    runner.arena.pages.zero_()
    stayed = driver.run(IDS, 6, lambda _: None)
    judged = compare_logits(Driver(lazy).run(IDS, 6, lambda _: None, moved=True), stayed, CAPS["float32"])
    assert judged["status"] == "Fail" and "kl_max" in judged["problem"]


def test_an_arena_without_room_for_both_places_is_refused(built: BuiltEngine, driver: Driver) -> None:
    with pytest.raises(ValueError, match="twice"):
        driver.run([1] * (built.runner.arena.num_pages * 128 // 2), 1, lambda _: None, moved=True)


def _nothing(pages: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    return None


def test_drawn_tokens_are_compared_with_the_definition_one_by_one() -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    reference = get_operator("sample").reference
    cpu = torch.device("cpu")

    def wrong_at_the_end(*args: torch.Tensor) -> torch.Tensor:
        out = reference(*args)
        out[-1] = (out[-1] + 1) % 50
        return out

    assert drawn_wrong(logits, reference, cpu) == ""
    assert "at token 39, 1 in all" in drawn_wrong(logits, wrong_at_the_end, cpu)
    assert "at token" in drawn_wrong(logits, lambda logits, *_: logits.argmax(-1), cpu)

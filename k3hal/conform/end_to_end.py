"""The end-to-end check: a small model's logits on the device against the same model on references."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3hal.conform.models import CAPS, MODELS, Caps, caps_of
from k3hal.conform.processes import Processes
from k3hal.conform.variants import DEFAULT, variants
from k3hal.debug.drive import Driver
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.errors import DispatchError
from k3hal.dispatch.plan import DispatchPlan
from k3hal.dispatch.plan_file import pairs_in, plan_json, saved
from k3hal.dispatch.registry import get_operator
from k3hal.engine.build import build_engine
from k3hal.model.write import write_preset

END_TO_END_TIMEOUT = 600.0
Note = Callable[[str, str], None]
"""Told of a dtype and a variant before they run."""
TOKENS, DECODES, DRAFTED = 136, 8, 3
"""Of the one sequence: more than two chunks of KDA and one page of MLA. The last ones are decoded, after all that is
cached has been copied to other pages: one with right drafts behind it and a wrong one, the others one by one."""


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """One of `MODELS`, which `preset` names, in one dtype, by the plan in force or a variant of it. `ran` are the
    (operator, provider) pairs that its logits come from; `plan` is the plan's JSON."""

    preset: str
    dtype: str
    status: str
    problem: str = ""
    variant: str = DEFAULT
    top1: float | None = None
    kl_mean: float | None = None
    kl_max: float | None = None
    rms: float | None = None
    ran: tuple[tuple[str, str], ...] = ()
    plan: dict[str, Any] | None = None


def compare_logits(logits: Tensor, good: Tensor, caps: Caps) -> dict[str, Any]:
    """The numbers of EndToEnd, and its status and problem. Logits are [T, V]; what is not finite fails."""
    if not bool(torch.isfinite(logits).all()):
        return {"status": "Fail", "problem": "logits are not finite"}
    a, g = logits.double(), good.double()
    log_a, log_g = a.log_softmax(-1), g.log_softmax(-1)
    kl = (log_g.exp() * (log_g - log_a)).sum(-1).clamp_min(0)
    rms = (a - g).square().mean(-1).sqrt() / g.square().mean(-1).sqrt().clamp_min(1e-30)
    same = (a.argmax(-1) == g.argmax(-1)).double().mean()
    numbers = {"top1": float(same), "kl_mean": float(kl.mean()), "kl_max": float(kl.max()), "rms": float(rms.max())}
    limits = {name: getattr(caps, name) for name in ("kl_mean", "kl_max", "rms")}
    bad = [
        f"{name} {numbers[name]:.3g} is above its cap {cap:g}" for name, cap in limits.items() if numbers[name] > cap
    ]
    if numbers["top1"] < caps.top1:
        bad.append(f"top1 {numbers['top1']:.3g} is below {caps.top1:g}")
    return {**numbers, "status": "Fail" if bad else "Pass", "problem": "; ".join(bad)}


def run_end_to_end(
    model: str, folder: Path, dtype: str, device: str, ops: str | None, note: Note, *, varied: bool
) -> Iterator[EndToEnd]:
    """The model's checkpoint on the device with the providers in force, and with `varied` in all other `variants`, each
    against the same on the CPU with references. `note` is told of each variant before it runs."""
    note(dtype, DEFAULT)
    good = _computed(model, folder, "cpu", dtype, "*=reference").logits
    first = _against(good, model, folder, dtype, device, ops, DEFAULT)
    yield first.result
    if varied and first.plan:
        for name, words in list(variants(first.plan, build_selector(ops, "warn"))):
            note(dtype, name)
            yield _against(good, model, folder, dtype, device, words, name).result


@dataclass(frozen=True, slots=True)
class _Run:
    result: EndToEnd
    plan: DispatchPlan | None = None


@dataclass(frozen=True, slots=True)
class _Computed:
    """Logits fp32 [T, V] on the CPU, the plan they come from, and what is wrong with the tokens drawn of them."""

    logits: Tensor
    plan: DispatchPlan
    drawn_wrong: str


def _against(good: Tensor, model: str, folder: Path, dtype: str, device: str, ops: str | None, variant: str) -> _Run:
    try:
        made = _computed(model, folder, device, dtype, ops)
    except DispatchError as error:
        return _Run(EndToEnd(model, dtype, "NotSupported", str(error), variant))
    plan = made.plan
    ran = tuple(sorted(pairs_in(saved(plan))))
    numbers = compare_logits(made.logits, good, caps_of(model, dtype))
    if made.drawn_wrong and numbers["status"] == "Pass":
        numbers |= {"status": "Fail", "problem": made.drawn_wrong}
    return _Run(EndToEnd(model, dtype, variant=variant, **numbers, ran=ran, plan=plan_json(plan)), plan)


def _computed(model: str, folder: Path, device: str, dtype: str, ops: str | None) -> _Computed:
    sizes = {"max_num_seqs": 2, "max_model_len": 4 * TOKENS, "max_num_batched_tokens": 4 * TOKENS}
    drafts = f"ngram:{DRAFTED + 1}"
    built = build_engine(
        str(folder), device=device, dtype=dtype, ops=ops, fallback="warn", warm_up="off", draft=drafts, **sizes,
        **MODELS[model].options,
    )  # fmt: skip
    try:
        vocabulary = built.engine.info.vocab_size
        ids = random.Random(0).choices(range(vocabulary), k=TOKENS)
        logits = Driver(built.runner).run(ids, DECODES, lambda _: None, moved=True, drafted=DRAFTED)
        draw = built.plan.bind().fn("sample")
        return _Computed(logits, built.plan, drawn_wrong(logits, draw, built.runner.arena.pages.device))
    finally:
        built.engine.close()


def drawn_wrong(logits: Tensor, draw: Callable[..., Tensor], device: torch.device) -> str:
    """What `draw`, a provider of `sample`, draws on the device from logits [T, V] and the operator's definition does
    not; empty when there is nothing. Logits that are not finite are not drawn from."""
    if not bool(torch.isfinite(logits).all()):
        return ""
    operator, rows = get_operator("sample"), logits.shape[0]
    cycle = torch.arange(rows)
    args = {
        "logits": logits,
        "temperature": torch.tensor([0.0, 0.7, 1.0])[cycle % 3],
        "top_k": torch.tensor([0, 20], dtype=torch.int32)[cycle % 2],
        "top_p": torch.tensor([1.0, 0.95, 0.8, 0.5])[cycle % 4],
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1])[cycle % 5],
        "uniform": torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    }
    outputs = {"out": draw(*(value.to(device) for value in args.values())).cpu()}
    wanted = {"out": operator.reference(**args)}
    if operator.settle_ties is not None:
        outputs = operator.settle_ties(args, outputs, wanted)
    wrong = (outputs["out"] != wanted["out"]).nonzero().flatten().tolist()
    if not wrong:
        return ""
    got, want = int(outputs["out"][wrong[0]]), int(wanted["out"][wrong[0]])
    return f"sample drew {got} for {want} at token {wrong[0]}, {len(wrong)} in all"


def end_to_end_isolated(
    model: str, device: str, ops: str | None, threads: int, processes: Processes, *, timeout: float, varied: bool
) -> list[EndToEnd]:
    """`run_end_to_end` of one of `MODELS` built from seed 0, in a process of its own: a crash or a hang is the result.

    Raises `Stopped` when the run was.
    """
    with tempfile.TemporaryDirectory(prefix="k3hal-conform-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", __name__, str(result)]
        job = json.dumps({"model": model, "device": device, "ops": ops, "threads": threads, "varied": varied})
        status, problem = "Crash", ""
        try:
            code, errors = processes.run(command, job, timeout)
            problem = f"code {code}: {next(iter(errors.strip().splitlines()[-1:]), '')}"
        except subprocess.TimeoutExpired:
            status, problem = "Timeout", f"did not end within {timeout:g} s"
        if not result.exists():
            return [EndToEnd(model, dtype, status, problem) for dtype in CAPS]
        made = json.loads(result.read_text("utf-8"))
        done = [EndToEnd(**one | {"ran": tuple((op, name) for op, name in one["ran"])}) for one in made["done"]]
        left = [EndToEnd(model, dtype, status, problem, variant) for dtype, variant in made["left"]]
        return done + left


def main(job: dict[str, Any], result: Path) -> None:
    """Make the model's checkpoint from its seed and check it. What is done and what is not goes to a file, always
    whole: who reads it after a crash knows in what variant it was."""
    torch.set_num_threads(job["threads"])
    done: list[dict[str, Any]] = []

    def write(*left: tuple[str, str]) -> None:
        partial = result.with_suffix(".partial")
        partial.write_text(json.dumps({"done": done, "left": left}), "utf-8")
        os.replace(partial, result)

    with tempfile.TemporaryDirectory(dir=result.parent) as folder:
        model, checkpoint = job["model"], Path(folder) / job["model"]
        write_preset(MODELS[model].preset, checkpoint, seed=0, layout=MODELS[model].layout)
        for number, dtype in enumerate(CAPS):
            later = [(other, DEFAULT) for other in list(CAPS)[number + 1 :]]

            def note(dtype: str, variant: str, later: list[tuple[str, str]] = later) -> None:
                write((dtype, variant), *later)

            how = (model, checkpoint, dtype, job["device"], job["ops"])
            for one in run_end_to_end(*how, note, varied=job["varied"]):
                done.append(dataclasses.asdict(one))  # noqa: PERF401 - `write` reads it in between
    write()


if __name__ == "__main__":
    main(json.load(sys.stdin), Path(sys.argv[1]))

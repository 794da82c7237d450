"""Draws a token from each row of logits; the randomness is an argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Outputs, Sample


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Token ids int64 [R], a function of each row alone.

    logits fp32 [R, V] (-inf masks a token, no NaN, not all -inf), temperature fp32 [R] >= 0, top_k int32 [R] (0 or less
    is off), top_p fp32 [R] (1 or more is off), min_p fp32 [R], uniform fp64 [R] in [0, 1). Temperature 0 takes the
    largest logit, the lowest id on ties. Else, with tokens in descending order of logit, ties by id, and
    p = softmax(logits / temperature) in fp64: keep the first top_k; of those, renormalised, keep while the sum before a
    token is below top_p; of those, keep p >= min_p * the largest p. The first token is always kept. The draw is the
    first kept token whose cumulative p exceeds uniform * the kept sum. Nothing mutated. Results may differ between
    providers only where uniform is within fp64 rounding of a boundary.
    """
    out = []
    for r in range(logits.shape[0]):
        if temperature[r] == 0:
            out.append(int(logits[r].argmax()))
            continue
        ordered, ids = (logits[r].double() / temperature[r].double()).sort(descending=True, stable=True)
        p = ordered.softmax(dim=0)
        if top_k[r] > 0:
            p = p[: int(top_k[r])] / p[: int(top_k[r])].sum()
        keep = (p.cumsum(0) - p < top_p[r]) | (top_p[r] >= 1)
        keep &= p >= min_p[r].double() * p[0]
        keep[0] = True
        cumulative = (p * keep).cumsum(0)
        drawn = (cumulative > uniform[r] * cumulative[-1]).int().argmax()
        out.append(int(ids[drawn]))
    return torch.tensor(out, dtype=torch.int64, device=logits.device)


def settle_ties(args: Mapping[str, Any], outputs: Outputs, golden: Outputs) -> Outputs:
    """The golden's token wherever another was drawn whose share begins or ends within fp64 rounding of `uniform`."""
    out, wanted = outputs["out"], golden["out"]
    rows = (out != wanted).nonzero().squeeze(-1)
    if not rows.numel():
        return outputs
    slack = args["logits"].shape[1] * 2.0**-53
    near = [
        sample(**{n: (v[rows] + step).clamp(0.0, 1.0 - 2**-53) if n == "uniform" else v[rows] for n, v in args.items()})
        for step in (-slack, slack)
    ]
    allowed = (out[rows] == near[0]) | (out[rows] == near[1])
    settled = out.clone()
    settled[rows] = torch.where(allowed, wanted[rows], out[rows])
    return {"out": settled}


def parameters(rows: int, **values: float | Sequence[float]) -> dict[str, Tensor]:
    """The per-row arguments but for `uniform`; what is not given is off, temperature is 1."""
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | values
    out = {}
    for name, value in given.items():
        column = [value] * rows if isinstance(value, int | float) else list(value)
        out[name] = torch.tensor(column, dtype=torch.int32 if name == "top_k" else torch.float32)
    return out


def _sample(
    name: str, rows: int, vocab: int, tags: set[str], spread: float = 2.0, **values: float | Sequence[float]
) -> Sample:
    def make(g: torch.Generator) -> dict[str, Any]:
        logits = torch.randn(rows, vocab, generator=g) * spread
        if "ties" in name:
            logits = logits.round()
        elif name == "masked":
            logits[torch.rand(rows, vocab, generator=g) < 0.9] = -torch.inf
            logits[:, vocab // 2] = 0.0
        uniform = torch.rand(rows, dtype=torch.float64, generator=g)
        if name == "last_kept":
            uniform = torch.full((rows,), 1.0 - 2**-53, dtype=torch.float64)
        elif name == "uniform_edges":
            uniform = torch.tensor([0.0, 1.0 - 2**-53] * (rows // 2), dtype=torch.float64)
        return {"logits": logits, **parameters(rows, **values), "uniform": uniform}

    return Sample(name, make, {"vocab": vocab}, "float32", tags=frozenset(tags))


def samples() -> Iterator[Sample]:
    """Greedy, plain, each filter alone and all together, ties, masks, extreme draws and temperatures, K3 size."""
    yield _sample("greedy", 3, 50, {"tiny"}, temperature=0.0)
    yield _sample("greedy_ties", 9, 50, {"must", "tiny", "adversarial"}, spread=1.0, temperature=0.0)
    yield _sample("plain", 8, 40, {"tiny"})
    yield _sample("top_k", 33, 100, {"edge"}, top_k=[0, 1, 2, 100, 1000, 7, 64, 99, 100, 3, 5] * 3)
    yield _sample("top_p", 32, 100, {"edge"}, top_p=[0.0, 0.5, 0.9, 1.0] * 8)
    yield _sample("min_p", 32, 100, {"edge"}, min_p=[0.0, 0.1, 0.5, 1.0] * 8)
    mixed = {"temperature": [0.0, 0.7, 1.0, 1.5] * 8, "top_k": [0, 20] * 16, "top_p": [0.95] * 32}
    yield _sample("mixed", 32, 300, {"edge"}, **mixed, min_p=[0.0, 0.05] * 16)
    yield _sample("ties", 64, 40, {"must", "edge", "adversarial"}, spread=1.0, top_k=5, top_p=[0.5, 0.8] * 32)
    yield _sample("masked", 32, 200, {"edge", "adversarial"}, top_k=[0, 50] * 16)
    yield _sample("uniform_edges", 32, 60, {"edge", "adversarial"}, top_p=[1.0, 1.0, 0.8, 0.8] * 8)
    shares, least = [1.0, 0.8, 0.7, 0.5] * 16, [0.0, 0.0, 0.0, 0.05] * 16
    yield _sample("last_kept", 64, 60, {"edge", "adversarial"}, top_p=shares, min_p=least)
    yield _sample("uniform_edges_ties", 32, 60, {"edge", "adversarial"}, spread=0.5)
    yield _sample("hot_and_cold", 16, 500, {"edge", "adversarial"}, temperature=[1e-3, 100.0] * 8)
    yield _sample("no_rows", 0, 20, {"edge", "adversarial"})
    yield _sample("one_token", 2, 1, {"edge"})
    yield _sample("k3_vocabulary", 6, 163_840, {"k3"}, temperature=[1.0, 0.0, 0.6] * 2, top_p=[0.95, 0.95, 1.0] * 2)


def cost(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Cost:
    """One pass over the logits."""
    return Cost(10.0 * logits.numel(), logits.nbytes + 32.0 * logits.shape[0])


OPERATOR = Operator(
    reference=sample,
    family="engine",
    outputs={"out": "exact"},
    samples=samples,
    cost=cost,
    invariants=("batch_composition", "distribution"),
    settle_ties=settle_ties,
)

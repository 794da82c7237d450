"""The router's choice: biased sigmoid top-k, unbiased weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Outputs, Sample


def moe_route(logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Weights fp32 `[T, k]` and expert ids int32 `[T, k]`, each row's in any order; equal scores go to the lower id.

    logits fp32 [T, E], bias fp32 [E]. With s = sigmoid(logits): ids are the top k of s + bias; weights are s there,
    without the bias, divided by (their sum + 1e-20) if `renormalize`, times `scale`. fp32, so that of two experts whose
    scores differ by less than 2 ulp either may be taken. Nothing mutated.
    Source: k3_architecture.md §5.1.
    """
    scores = torch.sigmoid(logits)
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    return _weights(scores.gather(1, ids), renormalize, scale), ids.int()


def _weights(scores: Tensor, renormalize: bool, scale: float) -> Tensor:
    if renormalize:
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    return scores * scale


def settle_ties(args: Mapping[str, Any], outputs: Outputs, golden: Outputs) -> Outputs:
    """The golden's order, and its expert wherever another of nearly the same score was taken.

    Weights then differ from the golden's by as much as they do from those of the experts that were taken.
    """
    ids, wanted = outputs["ids"].long(), golden["ids"].long()
    scores = torch.sigmoid(args["logits"].double())
    biased = scores + args["bias"].double()
    if not bool(((ids >= 0) & (ids < biased.shape[1])).all()):
        return outputs
    place = _matched(ids, wanted, biased)
    taken = ids.gather(1, place)
    own = [_weights(scores.gather(1, chosen), args["renormalize"], args["scale"]) for chosen in (taken, wanted)]
    weights = (outputs["weights"].double().gather(1, place) - own[0] + own[1]).float()
    settled = torch.where(_nearly_equal(biased.gather(1, taken), biased.gather(1, wanted)), wanted, taken)
    return {"weights": weights, "ids": settled.int()}


def _matched(ids: Tensor, wanted: Tensor, biased: Tensor) -> Tensor:
    """For each wanted expert its place in `ids`; those that are missing get the places left over, by score."""
    places = torch.empty_like(wanted)
    for row, (have, want) in enumerate(zip(ids.tolist(), wanted.tolist(), strict=True)):
        at = {expert: place for place, expert in enumerate(have)}
        score = biased[row].tolist()
        spare = sorted(set(range(len(have))) - {at[e] for e in want if e in at}, key=lambda j: -score[have[j]])
        missing = sorted((e for e in want if e not in at), key=lambda e: -score[e])
        at |= dict(zip(missing, spare, strict=False))
        places[row] = places.new_tensor([at[e] for e in want])
    return places


def _nearly_equal(a: Tensor, b: Tensor) -> Tensor:
    """Whether fp32 cannot be asked to tell two scores apart; scores that are the same it can."""
    largest = torch.maximum(a.abs(), b.abs()).float()
    ulp = torch.nextafter(largest, torch.full_like(largest, torch.inf)) - largest
    return (a != b) & ((a - b).abs() < 2 * ulp)


def _logits(g: torch.Generator, tokens: int, experts: int, kind: str) -> tuple[Tensor, Tensor]:
    """Scores too far apart for the rounding of a sigmoid to reorder them, except where equal on purpose."""
    grid = torch.linspace(0.03, 0.97, experts).logit()
    logits = grid[torch.rand(tokens, experts, generator=g).argsort(dim=-1)]
    bias = torch.zeros(experts)
    if kind == "ties":
        logits = torch.randint(0, 3, (tokens, experts), generator=g).float()
    elif kind == "all_equal":
        logits = torch.full((tokens, experts), 0.25)
    elif kind == "small_scores":
        logits = logits - 16.0
    elif kind == "all_zero":
        logits = torch.full((tokens, experts), -200.0)
    elif kind == "saturated":
        logits = torch.where(logits > 0, 200.0, -200.0)
    elif kind == "near_ties":
        # Neighbours in fp32, two by two, from where a sigmoid tells them apart to where it does not.
        pairs = torch.nextafter(logits[:, 1::2], torch.full((), torch.inf))
        logits[:, ::2][:, : pairs.shape[1]] = pairs
    elif kind == "biased":
        # Every bias is a whole multiple of more than the scores' range: the order is the bias's alone.
        bias = torch.randperm(experts, generator=g).float() - 2.0
    return logits, bias


def _sample(
    name: str, tokens: int, experts: int, top_k: int, tags: set[str], renormalize: bool = True, scale: float = 1.0
) -> Sample:
    def make(g: torch.Generator) -> dict[str, Any]:
        logits, bias = _logits(g, tokens, experts, name)
        return {"logits": logits, "bias": bias, "top_k": top_k, "renormalize": renormalize, "scale": scale}

    return Sample(name, make, {"experts": experts, "top_k": top_k}, "float32", tags=frozenset(tags))


def samples() -> Iterator[Sample]:
    """Tiny, plain and renormalised, ties and near ties, scores of exactly 0 and 1, all experts chosen, 16 of 896."""
    yield _sample("tiny", 3, 8, 2, {"tiny"})
    yield _sample("one", 1, 16, 4, {"tiny"})
    yield _sample("plain", 5, 16, 4, {"must", "tiny"}, renormalize=False, scale=2.446)
    yield _sample("biased", 9, 32, 8, {"tiny", "adversarial"})
    yield _sample("ties", 17, 33, 7, {"edge", "adversarial"})
    yield _sample("near_ties", 33, 40, 7, {"edge", "adversarial"})
    yield _sample("all_equal", 4, 16, 5, {"edge", "adversarial"})
    yield _sample("saturated", 4, 16, 12, {"edge", "adversarial"})
    yield _sample("small_scores", 3, 16, 3, {"must", "edge", "adversarial"})
    yield _sample("all_zero", 2, 16, 3, {"must", "edge", "adversarial"})
    yield _sample("every_expert", 4, 6, 6, {"edge"})
    yield _sample("no_rows", 0, 8, 2, {"edge", "adversarial"})
    yield _sample("k3", 65, 896, 16, {"k3"})
    yield _sample("kimi_linear", 64, 256, 8, {"k3"}, scale=2.446)


def cost(logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float) -> Cost:
    """One pass over the logits."""
    return Cost(8.0 * logits.numel(), logits.nbytes + bias.nbytes + 8.0 * logits.shape[0] * top_k)


OPERATOR = Operator(
    reference=moe_route,
    family="moe",
    outputs={"weights": "fp32", "ids": "exact"},
    samples=samples,
    cost=cost,
    invariants=("batch_composition", "ties_to_lowest_id"),
    settle_ties=settle_ties,
)

"""Faults of sampling and of the acceptance of drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k3hal.conform.faults.fault import Arguments, Catalogue, Right, reference_with

SAMPLING = Catalogue()
fault = SAMPLING.fault
Keep = Callable[[Tensor, float, int, float, float], Tensor]


def _kept(p: Tensor, top_p: float, top_k: int, min_p: float, temperature: float) -> Tensor:
    """The right filter: bool [V] of descending probabilities."""
    keep = torch.arange(len(p)) < (top_k if top_k > 0 else len(p))
    q = p * keep / (p * keep).sum()
    keep = keep & ((q.cumsum(0) - q < top_p) | torch.tensor(top_p >= 1))
    keep &= q >= min_p * q[0]
    keep[0] = True
    return keep


def drawn(args: Arguments, keep: Keep = _kept, stable: bool = True) -> Tensor:
    """The operator with another filter, or with ties in another order."""
    out = []
    for r in range(args["logits"].shape[0]):
        temperature = float(args["temperature"][r])
        logits = args["logits"][r].double()
        if temperature == 0:
            out.append(int(logits.argmax()))
            continue
        order = torch.arange(len(logits)) if stable else torch.arange(len(logits) - 1, -1, -1)
        ids = order[(logits[order] / temperature).sort(descending=True, stable=True).indices]
        p = (logits[ids] / temperature).softmax(0)
        kept = keep(p, float(args["top_p"][r]), int(args["top_k"][r]), float(args["min_p"][r]), temperature)
        total = (p * kept).cumsum(0)
        out.append(int(ids[int((total > args["uniform"][r] * total[-1]).int().argmax())]))
    return torch.tensor(out, dtype=torch.int64)


def _add(name: str, bug: str, keep: Keep, first: str = "") -> None:
    SAMPLING.add(name, "sample", bug, lambda right, args: drawn(args, keep), first)


def _top_p_edge(p: Tensor, top_p: float, top_k: int, min_p: float, temperature: float) -> Tensor:
    keep = _kept(p, 1.0, top_k, min_p, temperature)
    q = p * keep / (p * keep).sum()
    keep &= (q.cumsum(0) <= top_p) | torch.tensor(top_p >= 1)
    keep[0] = True
    return keep


def _top_p_unnormalised(p: Tensor, top_p: float, top_k: int, min_p: float, temperature: float) -> Tensor:
    keep = _kept(p, 1.0, top_k, min_p, temperature)
    return keep & ((p.cumsum(0) - p < top_p) | torch.tensor(top_p >= 1))


def _min_p_absolute(p: Tensor, top_p: float, top_k: int, min_p: float, temperature: float) -> Tensor:
    keep = _kept(p, top_p, top_k, 0.0, temperature) & (p >= min_p)
    keep[0] = True
    return keep


_add("top_p_excludes_edge", "The token that crosses top_p is left out", _top_p_edge, "top_p")
_add("top_p_before_top_k", "top_p is taken of the whole distribution, not of the top k", _top_p_unnormalised, "ties")
_add("min_p_absolute", "min_p is a probability, not a share of the largest", _min_p_absolute, "min_p")
_add("top_k_off_by_one", "k + 1 tokens are kept", lambda p, t, k, m, x: _kept(p, t, k + (k > 0), m, x), "top_k")
_add("top_k_ignored", "top_k is not applied", lambda p, t, k, m, x: _kept(p, t, 0, m, x), "top_k")
_add("top_p_ignored", "top_p is not applied", lambda p, t, k, m, x: _kept(p, 1.0, k, m, x), "top_p")
_add("min_p_ignored", "min_p is not applied", lambda p, t, k, m, x: _kept(p, t, k, 0.0, x), "min_p")


@fault("sample")
def seed_ignored(right: Right, args: Arguments) -> Any:
    """The draw comes from a generator of the kernel's own."""
    generator = right.memory.setdefault("generator", torch.Generator().manual_seed(7))
    return right(args, uniform=torch.rand(args["uniform"].shape, dtype=torch.float64, generator=generator))


@fault("sample")
def one_draw_for_the_batch(right: Right, args: Arguments) -> Any:
    """All rows use the first one's random number."""
    return right(args, uniform=args["uniform"][:1].expand_as(args["uniform"]).contiguous())


@fault("sample", first="mixed")
def parameters_of_the_first_row(right: Right, args: Arguments) -> Any:
    """All rows are sampled with the first one's parameters."""
    names = ("temperature", "top_k", "top_p", "min_p")
    return right(args, **{name: args[name][:1].expand_as(args[name]).contiguous() for name in names})


@fault("sample", first="hot_and_cold")
def temperature_ignored(right: Right, args: Arguments) -> Any:
    """Only greedy and temperature 1 are told apart."""
    return right(args, temperature=(args["temperature"] > 0).float())


@fault("sample", first="mixed")
def temperature_multiplied(right: Right, args: Arguments) -> Any:
    """Logits are multiplied by the temperature."""
    temperature = args["temperature"]
    return right(args, temperature=torch.where(temperature > 0, 1 / temperature, temperature))


@fault("sample", first="greedy")
def greedy_is_drawn(right: Right, args: Arguments) -> Any:
    """Temperature 0 is taken as a small temperature, without the tie rule."""
    return right(args, temperature=args["temperature"].clamp_min(0.5))


@fault("sample", first="greedy_ties")
def greedy_tie_to_the_last(right: Right, args: Arguments) -> Any:
    """Of equal largest logits the last is taken."""
    out = right(args)
    last = args["logits"].shape[1] - 1 - args["logits"].flip(1).argmax(1)
    return torch.where(args["temperature"] == 0, last, out)


@fault("sample", first="ties")
def ties_in_another_order(right: Right, args: Arguments) -> Any:
    """Equal logits are ordered by descending id."""
    return drawn(args, stable=False)


@fault("sample", first="uniform_edges")
def draw_at_the_edge(right: Right, args: Arguments) -> Any:
    """A cumulative sum in fp32: a draw next to 1 falls behind the last token and takes token 0."""
    return torch.where((args["uniform"].float() >= 1) & (args["temperature"] > 0), 0, right(args))


@fault("sample", first="masked")
def mask_ignored(right: Right, args: Arguments) -> Any:
    """Masked tokens, -inf, become the smallest finite logit of a grammar's mask: 0."""
    return right(args, logits=args["logits"].masked_fill(args["logits"].isinf(), 0.0))


@fault("verify_draft", first="ragged_standard")
def negative_draft_accepted(right: Right, args: Arguments) -> Any:
    """A row with fewer drafts than others has the rest taken as token 0."""
    return right(args, draft_ids=args["draft_ids"].clamp_min(0))


@fault("verify_draft")
def next_token_from_target(right: Right, args: Arguments) -> Any:
    """After a rejection the next token is drawn from the target, not from what the draft leaves over."""
    kept, _ = right(args)
    draw = [int((t.cumsum(0) > u * t.sum()).int().argmax()) for t, u in _at(kept, args)]
    return kept, torch.tensor(draw, dtype=torch.int64)


def _at(kept: Tensor, args: Arguments) -> list[tuple[Tensor, float]]:
    rows = range(len(kept))
    return [(args["target_probs"][n, kept[n]].double(), float(args["uniform"][n, -1])) for n in rows]


@fault("verify_draft")
def one_draft_too_many(right: Right, args: Arguments) -> Any:
    """The rejected draft is counted as accepted."""
    kept, following = right(args)
    return (kept + 1).clamp_max(args["draft_ids"].shape[1]), following


@fault("verify_draft")
def greedy_comparison(right: Right, args: Arguments) -> Any:
    """A draft is accepted if it is the target's likeliest token."""
    same = args["draft_ids"] == args["target_probs"][:, :-1].argmax(-1)
    return same.int().cumprod(1).sum(1), right(args)[1]


@fault("verify_draft")
def methods_confused(right: Right, args: Arguments) -> Any:
    """Block verification where standard was asked for, and the other way round."""
    return right(args, method="standard" if args["method"] == "block" else "block")


@fault("verify_draft")
def acceptance_draw_shifted(right: Right, args: Arguments) -> Any:
    """Each draft is judged by the next one's random number."""
    return right(args, uniform=args["uniform"].roll(-1, 1))


@fault("verify_draft", first="tiny_standard")
def draft_probability_ignored(right: Right, args: Arguments) -> Any:
    """Drawn drafts are judged like greedy ones."""
    return right(args, draft_probs=None)


@fault("verify_draft", first="tiny_block")
def prefix_not_capped(right: Right, args: Arguments) -> Any:
    """Block verification lets the running product pass 1."""
    return reference_with("verify_draft", args, _accept_block=_uncapped)


def _uncapped(drafts: list[int], draft: Tensor, target: Tensor, u: list[float]) -> tuple[int, float]:
    p, kept, mass = 1.0, 0, 1.0
    for i, token in enumerate(drafts):
        p *= float(target[i, token]) / max(float(draft[i, token]), 1e-300)
        threshold = p
        if i + 1 < len(drafts):
            rest = float((p * target[i + 1] - draft[i + 1]).clamp_min(0.0).sum())
            threshold = rest / (rest + 1.0 - p) if rest + 1.0 - p > 0 else 1.0
        if u[i] < threshold:
            kept, mass = i + 1, p
    return kept, mass

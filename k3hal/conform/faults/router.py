"""Faults of the router's choice and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k3hal.conform.faults.fault import Arguments, Catalogue, Right

ROUTER = Catalogue()


@ROUTER.fault("moe_route", first="biased")
def bias_in_the_weights(right: Right, args: Arguments) -> Any:
    """The correction bias, meant for the choice alone, goes into the weights."""
    _, ids = right(args)
    weights = (torch.sigmoid(args["logits"]) + args["bias"]).gather(1, ids.long())
    if args["renormalize"]:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * args["scale"], ids


@ROUTER.fault("moe_route", first="biased")
def bias_ignored(right: Right, args: Arguments) -> Any:
    """The choice is made without the correction bias."""
    return right(args, bias=torch.zeros_like(args["bias"]))


@ROUTER.fault("moe_route", first="ties")
def ties_to_the_higher_id(right: Right, args: Arguments) -> Any:
    """Of equal scores the later expert is chosen."""
    weights, ids = right(args, logits=args["logits"].flip(1), bias=args["bias"].flip(0))
    return weights, args["logits"].shape[1] - 1 - ids


@ROUTER.fault("moe_route")
def not_renormalised(right: Right, args: Arguments) -> Any:
    """The weights of the chosen are not divided by their sum."""
    return right(args, renormalize=False)


@ROUTER.fault("moe_route", first="plain")
def always_renormalised(right: Right, args: Arguments) -> Any:
    """The weights are divided by their sum although the model does not ask for it."""
    return right(args, renormalize=True)


@ROUTER.fault("moe_route", first="plain")
def scale_dropped(right: Right, args: Arguments) -> Any:
    """routed_scaling_factor is not applied."""
    return right(args, scale=1.0)


@ROUTER.fault("moe_route")
def softmax_scores(right: Right, args: Arguments) -> Any:
    """Scores are a softmax, as in the models before."""
    return routed_by(args, lambda logits: logits.softmax(-1))


@ROUTER.fault("moe_route", first="k3")
def scores_in_bf16(right: Right, args: Arguments) -> Any:
    """The scores pass through bf16: near ties become ties."""
    return routed_by(args, lambda logits: torch.sigmoid(logits).bfloat16().float())


def routed_by(args: Arguments, scores_of: Callable[[Tensor], Tensor], small: float = 1e-20) -> Any:
    """The router with other scores, or another guard of its division."""
    scores = scores_of(args["logits"])
    ids = torch.sort(scores + args["bias"], dim=-1, descending=True, stable=True).indices[:, : args["top_k"]]
    weights = scores.gather(1, ids)
    if args["renormalize"]:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + small)
    return weights * args["scale"], ids.int()


@ROUTER.fault("moe_route", first="all_zero")
def division_unguarded(right: Right, args: Arguments) -> Any:
    """The sum of the chosen is divided by without its 1e-20."""
    return routed_by(args, torch.sigmoid, small=0.0)


@ROUTER.fault("moe_route", first="small_scores")
def division_guarded_too_much(right: Right, args: Arguments) -> Any:
    """The guard of the division is 1e-6."""
    return routed_by(args, torch.sigmoid, small=1e-6)


@ROUTER.fault("moe_route")
def best_chosen_twice(right: Right, args: Arguments) -> Any:
    """The best expert is not masked after its choice and takes the last place too."""
    weights, ids = (part.clone() for part in right(args))
    weights[:, -1], ids[:, -1] = weights[:, 0], ids[:, 0]
    return weights, ids


@ROUTER.fault("moe_route")
def weights_in_another_order(right: Right, args: Arguments) -> Any:
    """Ids are sorted for the next kernel and the weights are not."""
    weights, ids = right(args)
    return weights, ids.sort(dim=1).values


@ROUTER.fault("moe_route", first="one")
def two_groups(right: Right, args: Arguments) -> Any:
    """Group-limited choice: the lower half of the experts is masked when the upper half scores higher."""
    scores = torch.sigmoid(args["logits"]) + args["bias"]
    half = scores.shape[1] // 2
    lower = scores[:, :half].sum(-1, keepdim=True) < scores[:, half:].sum(-1, keepdim=True)
    worst = torch.where(torch.arange(scores.shape[1]) < half, lower, ~lower)
    return right(args, logits=args["logits"].masked_fill(worst, -50.0))


@ROUTER.fault("moe_route")
def ids_in_int64(right: Right, args: Arguments) -> Any:
    """Ids come as int64, twice as wide as the next kernel reads."""
    weights, ids = right(args)
    return weights, ids.long()

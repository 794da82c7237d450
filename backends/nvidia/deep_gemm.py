"""Routed experts with plain weights by DeepGEMM's grouped products.

Its products with fp4 weights take activations in fp8, which no operator here allows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from k3hal.backends.nvidia._library import PRIORITY
from k3hal.dispatch import Answer, Call, Needs, provides
from k3hal.dispatch.library import recorded, unless, usable
from k3hal.dispatch.ops._experts import gated
from k3hal.dispatch.transforms.experts import Grouped

NEEDS = Needs(packages={"sgl-deep-gemm": ">=0.1.4,<0.3"}, dtypes=("bfloat16",), arch=("sm_90", "sm_100", "sm_103"))
# One wheel serves every Python but only the torch it was built for: with another it misreads a tensor's sizes (0.1.7
# on torch 2.11 takes a matrix for something of neither two nor three dimensions). The pairs are those SGLang pins.
BUILT_FOR = {">=0.1.4,<0.1.6": "2.11", ">=0.1.7,<0.2": "2.13", ">=0.2.3,<0.2.4": "2.14"}
ALIGNMENT = recorded(__name__, "sgl-deep-gemm", "deep_gemm:get_mk_alignment_for_contiguous_layout", ())
PRODUCT = recorded(
    __name__, "sgl-deep-gemm", "deep_gemm:m_grouped_bf16_gemm_nt_contiguous",
    ("a", "b", "d", "grouped_layout"),
)  # fmt: skip
_MULTIPLE = 64


def _torch(packages: Mapping[str, str]) -> str | None:
    """Why the library does not go with the torch beside it; None where it does, or where either is not there."""
    own, torch_version = packages.get("sgl-deep-gemm"), packages.get("torch")
    if own is None or torch_version is None:
        return None
    release = ".".join(torch_version.split(".")[:2])
    built = next((wanted for range_, wanted in BUILT_FOR.items() if SpecifierSet(range_).contains(own)), None)
    if built is None:
        return f"sgl-deep-gemm {own} is built for no torch known here"
    return unless(release == built, f"sgl-deep-gemm {own} is built for torch {built}, this is {release}")


def _supports(call: Call) -> Answer:
    sizes = {name: int(call.dims.get(name) or _MULTIPLE) for name in ("hidden", "intermediate")}
    odd = [f"needs {name} a multiple of {_MULTIPLE}, this is {n}" for name, n in sizes.items() if n % _MULTIPLE]
    activation = unless(call.dims.get("activation") != "none", "no activation")
    return usable(call, (ALIGNMENT, PRODUCT), *odd, activation, _torch(call.device.packages))


# It compiles for a shape when it first meets it.
@provides("moe_experts", name="deep_gemm", needs=NEEDS, supports=_supports, priority=PRIORITY)
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See the operator. Each expert's rows begin at a multiple of the library's tile; a row of -1 is of none."""
    (tokens, choices), experts = ids.shape, w13.shape[0]
    if tokens == 0:
        return torch.zeros_like(x)
    tile = int(ALIGNMENT())
    grouped = Grouped.of(ids, experts)
    tiles = (grouped.counts + tile - 1) // tile * tile
    starts = torch.cat((tiles.cumsum(0) - tiles, tiles.sum().view(1)))
    before = torch.cat((grouped.counts.cumsum(0) - grouped.counts, grouped.counts.sum().view(1)))
    place = torch.arange(tokens * choices, device=x.device) - before[grouped.expert] + starts[grouped.expert]
    # No more tiles than choices, nor than full ones and one begun by each expert; and one for choices of no expert.
    most = min(tokens * choices, tokens * choices // tile + experts) * tile + tokens * choices
    most = -(-most // tile) * tile
    layout = torch.full((most,), -1, dtype=torch.int32, device=x.device)
    layout[place] = torch.where(grouped.expert < experts, grouped.expert, -1).int()
    rows = x.new_zeros(most, x.shape[1])
    rows[place] = torch.where((grouped.expert < experts).unsqueeze(-1), x[grouped.order // choices], 0.0)
    hidden = x.new_empty(most, w13.shape[1])
    PRODUCT(a=rows, b=w13, d=hidden, grouped_layout=layout)
    acted = gated(hidden.float(), activation, beta, linear_beta).to(x.dtype)
    out = x.new_empty(most, w2.shape[1])
    PRODUCT(a=acted, b=w2, d=out, grouped_layout=layout)
    return grouped.combined(out[place], ids, weights, x.dtype)

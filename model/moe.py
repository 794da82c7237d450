"""Gated MLPs and Stable LatentMoE (spec k3_architecture §5)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3hal.dispatch.errors import K3HALError
from k3hal.model.context import Build
from k3hal.model.modelslim_reader import GROUP, SlimReader
from k3hal.model.requests import experts_op


def activation(build: Build, layer: int) -> Callable[[Tensor], Tensor]:
    """The gated activation on [T, 2 I], gate half first."""
    cfg = build.cfg
    if cfg.activation == "silu":
        return build.ops.fn("silu_and_mul", layer)
    situ, beta, linear_beta = build.ops.fn("situ_and_mul", layer), cfg.situ_beta, cfg.situ_linear_beta
    return lambda x: situ(x, beta, linear_beta)


def mlp_weights(build: Build, layer: int, prefix: str, intermediate: int) -> tuple[Tensor, Tensor]:
    """The fused [2 I, D] gate and up, and [D, I] down projections of a gated MLP."""
    names = [build.layer_name(layer, f"{prefix}.{part}_proj.weight") for part in ("gate", "up", "down")]
    local = build.parallel.local(intermediate)
    gate_up = build.fuse_rows(names[:2], [local, local], build.cfg.hidden_size)
    return gate_up, build.reader.get(names[2], shard=build.parallel.row())


class MLP:
    """A gated MLP: a dense layer's, or the fused shared experts'. Its sums are those of this rank's channels."""

    def __init__(self, build: Build, layer: int, gate_up: Tensor, down: Tensor) -> None:
        self.act = activation(build, layer)
        self.gate_up, self.down = build.linear(gate_up), build.linear(down)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate_up(x)))


def dense_mlp(build: Build, layer: int) -> Callable[[Tensor], Tensor]:
    """The MLP of a layer before `first_k_dense_replace`."""
    return build.summed(MLP(build, layer, *mlp_weights(build, layer, "mlp", build.cfg.intermediate_size)))


class MoE:
    """Router on the full width, routed experts (in a latent space where the config has one), shared experts."""

    def __init__(self, build: Build, layer: int) -> None:
        cfg, reader = build.cfg, build.reader

        def name(part: str) -> str:
            return build.layer_name(layer, f"block_sparse_moe.{part}")

        self.route = build.ops.fn("moe_route", layer)
        self.routing = (cfg.top_k, cfg.renormalize, cfg.routed_scaling_factor)
        self.act = (cfg.activation, cfg.situ_beta, cfg.situ_linear_beta)
        # The router runs in fp32: near-tied experts must not be decided by bf16 rounding.
        self.router = build.linear(reader.get(name("gate.weight")), op="linear_fp32")
        self.bias = reader.get(name("gate.e_score_correction_bias"), torch.float32)
        shared_size = cfg.num_shared_experts * cfg.moe_intermediate_size
        gate_up, down = mlp_weights(build, layer, "block_sparse_moe.shared_experts", shared_size)
        self.op = experts_op(cfg, ranks=build.parallel.world > 1)
        self.experts = build.ops.fn(self.op, layer)
        weights = _load_experts(build, layer)
        self.extra, self.shared, self.latent = {}, None, None
        if self.op == "latent_moe":
            weights |= latent_weights(build, layer) | {"shared_gate_up": gate_up, "shared_down": down}
            weights |= {"w13_scale": weights.get("w13_scale"), "w2_scale": weights.get("w2_scale")}
            self.extra = {"expert_format": cfg.expert_format, "eps": cfg.rms_norm_eps}
        else:
            self.shared = MLP(build, layer, gate_up, down)
            self.latent = LatentSpace(build, layer) if cfg.latent_size else None
        self.weights = dict(build.ops.prepare(self.op, layer, "any", **weights))
        self.parallel = build.parallel

    def __call__(self, x: Tensor) -> Tensor:
        gate, ids = self.route(self.router(x), self.bias, *self.routing)
        if self.latent:
            return self.latent.leave(self._routed(self.latent.enter(x), ids, gate)) + self._shared(x)
        out = self._routed(x, ids, gate)
        return self.parallel.sum_up(out if self.shared is None else out + self.shared(x))

    def _routed(self, x: Tensor, ids: Tensor, gate: Tensor) -> Tensor:
        kind, beta, linear_beta = self.act
        return self.experts(
            x, ids, gate, **self.weights, **self.extra, activation=kind, beta=beta, linear_beta=linear_beta
        )

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared is not None
        return self.parallel.sum_up(self.shared(x))


class LatentSpace:
    """Into the routed experts' latent space and out of it, where the coarse operator does not do both.

    That one is a single rank's, as ranks have to meet between the experts and the norm, which is not linear; and it
    rounds no activations.
    """

    def __init__(self, build: Build, layer: int) -> None:
        weights = latent_weights(build, layer)
        down, self.weight, up = weights["down_weight"], weights["norm_weight"], weights["up_weight"]
        assert down is not None and up is not None
        self.enter, self.up = build.linear(down), build.linear(up)
        self.norm, self.eps, self.sum_up = build.ops.fn("rms_norm"), build.cfg.rms_norm_eps, build.parallel.sum_up

    def leave(self, y: Tensor) -> Tensor:
        """[T, L], this rank's part of the experts' sum, to [T, D]."""
        y = self.sum_up(y)
        return self.up(y if self.weight is None else self.norm(y, self.weight, self.eps, None))


def latent_weights(build: Build, layer: int) -> dict[str, Tensor | None]:
    """What leads into the latent space and out of it, the same on every rank."""

    def name(part: str) -> str:
        return build.layer_name(layer, f"block_sparse_moe.routed_expert_{part}.weight")

    return {
        "down_weight": build.reader.get(name("down_proj")),
        "norm_weight": build.reader.get(name("norm")) if build.cfg.latent_norm else None,
        "up_weight": build.reader.get(name("up_proj")),
    }


def _load_experts(build: Build, layer: int) -> dict[str, Tensor | None]:
    """Expert weights stacked as [E, ...]: `w13` rows are gate then up; packed codes and scales stay packed."""
    cfg, packed = build.cfg, build.cfg.expert_format == "mxfp4"
    if cfg.expert_format == "int4":
        return _load_int4(build, layer)
    width, count = cfg.latent_size or cfg.hidden_size, cfg.num_experts
    inner, column, row = build.parallel.local(cfg.moe_intermediate_size), build.parallel.column(), build.parallel.row()
    dtype = torch.uint8 if packed else build.dtype
    suffixes = {"": ("weight_packed", 2), "_scale": ("weight_scale", 32)} if packed else {"": ("weight", 1)}
    out: dict[str, Tensor | None] = {}
    for key, (suffix, per) in suffixes.items():
        w13 = torch.empty(count, 2 * inner, width // per, dtype=dtype, device=build.device)
        w2 = torch.empty(count, width, inner // per, dtype=dtype, device=build.device)
        for e in range(count):
            base = build.layer_name(layer, f"block_sparse_moe.experts.{e}.")
            build.reader.fill(w13[e, :inner], f"{base}w1.{suffix}", shard=column)
            build.reader.fill(w13[e, inner:], f"{base}w3.{suffix}", shard=column)
            build.reader.fill(w2[e], f"{base}w2.{suffix}", shard=row)
        out |= {f"w13{key}": w13, f"w2{key}": w2}
    return out


def _load_int4(build: Build, layer: int) -> dict[str, Tensor | None]:
    """As `_load_experts`, of a checkpoint of msModelSlim's, whose reader packs codes anew."""
    cfg, reader = build.cfg, build.reader
    if not isinstance(reader, SlimReader):
        raise K3HALError("int4 experts are read from a checkpoint of msModelSlim's alone")
    width, inner, count = cfg.latent_size or cfg.hidden_size, cfg.moe_intermediate_size, cfg.num_experts
    shapes = {"w13": (2 * inner, width), "w2": (width, inner)}
    out: dict[str, Tensor | None] = {}
    for key, (rows, columns) in shapes.items():
        codes = torch.empty(count, rows, columns // 2, dtype=torch.uint8, device=build.device)
        scales = torch.empty(count, rows, columns // GROUP, dtype=build.dtype, device=build.device)
        parts = {"w1": slice(0, inner), "w3": slice(inner, None)} if key == "w13" else {"w2": slice(None)}
        for e in range(count):
            base = build.layer_name(layer, f"block_sparse_moe.experts.{e}.")
            for part, mine in parts.items():
                reader.fill_int4(codes[e, mine], scales[e, mine], f"{base}{part}.weight")
        out |= {key: codes, f"{key}_scale": scales}
    return out

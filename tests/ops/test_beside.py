"""Shared experts beside the routed ones: the same result in whatever order they run, and only of few tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.beside import BESIDE, FEW_TOKENS, Work
from k3hal.dispatch.call import Call
from k3hal.dispatch.observe import Place, observing
from k3hal.dispatch.operator import Sample
from k3hal.dispatch.plan import OpRequest, make_plan
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator
from k3hal.dispatch.runtime import Graph, runtime_for
from k3hal.dispatch.select import Decision

OPERATOR = get_operator("latent_moe")
TINY = [pytest.param(sample, id=sample.name) for sample in OPERATOR.samples() if "tiny" in sample.tags]


@dataclass
class Branch:
    """A `Beside` that does its work at once, or when it is asked for; counts both."""

    at_once: bool
    begun: int = 0
    joined: int = 0
    _open: list[Any] = field(default_factory=list)

    def __call__(self, work: Work) -> Work:
        self.begun += 1
        result = work() if self.at_once else None

        def join() -> Any:
            self.joined += 1
            return result if self.at_once else work()

        return join


def composed(**more: Any) -> Callable[..., torch.Tensor]:
    assert OPERATOR.lowering is not None
    return OPERATOR.lowering({name: get_operator(name).reference for name in OPERATOR.lowers_to} | more)


@pytest.mark.parametrize("sample", TINY)
@pytest.mark.parametrize("at_once", [True, False])
def test_the_order_changes_no_bit(sample: Sample, at_once: bool) -> None:
    args, branch = sample.make(torch.Generator().manual_seed(3)), Branch(at_once)
    assert torch.equal(composed(**{BESIDE: branch})(**args), composed()(**args))
    assert (branch.begun, branch.joined) == (1, 1)


@pytest.mark.parametrize(("tokens", "begun"), [(1, 1), (FEW_TOKENS, 1), (FEW_TOKENS + 1, 0)])
def test_only_few_tokens_branch_off(tokens: int, begun: int) -> None:
    sample = next(s for s in OPERATOR.samples() if s.name == "one_token_bf16")
    args = sample.make(torch.Generator().manual_seed(4))
    many = {name: args[name][:1].repeat(tokens, 1) for name in ("x", "ids", "weights")}
    branch = Branch(at_once=True)
    out = composed(**{BESIDE: branch})(**args | many)
    assert out.shape[0] == tokens
    assert branch.begun == begun


def _composed_plan() -> Any:
    dims = next(sample.dims for sample in OPERATOR.samples() if sample.name == "tiny_mxfp4")
    selector = build_selector("latent_moe=composed")
    return make_plan(
        [OpRequest("latent_moe", (0,), dims=dims)], selector, model="m", device=probe("cpu"), dtype="bfloat16"
    )


class Watcher:
    def bound(self, place: Place, decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    def prepared(self, place: Place, decision: Decision, given: Any, prepared: Any) -> None:
        return None


def test_a_plan_hands_it_to_what_is_composed_but_not_where_calls_are_watched() -> None:
    sample = next(s for s in OPERATOR.samples() if s.name == "tiny_mxfp4")
    args = sample.make(torch.Generator().manual_seed(5))
    branch = Branch(at_once=True)

    def run() -> torch.Tensor:
        ops = _composed_plan().bind(branch)
        weights = ops.prepare("latent_moe", 0, **{name: args[name] for name in OPERATOR.weights})
        return ops.fn("latent_moe", 0)(**args | dict(weights))

    out = run()
    assert branch.begun == 1
    with observing(Watcher()):
        assert torch.equal(run(), out)
    assert branch.begun == 1


@pytest.mark.device
@pytest.mark.parametrize("name", ["tiny_mxfp4", "small_batch_mxfp4", "tiny_bf16"])
def test_a_captured_branch_gives_what_one_stream_gives(name: str) -> None:
    """Replays one behind the other, so that a branch that starts too early or is not waited for is seen."""
    device = probe("cuda")
    runtime = runtime_for(device)
    sample = next(s for s in OPERATOR.samples() if s.name == name)
    decision = build_selector("latent_moe=composed").decide(
        Call("latent_moe", device, sample.dtype, sample.phase, sample.dims)
    )
    assert decision.composed
    args = sample.make(torch.Generator().manual_seed(6))
    args = {k: v.to(device.torch_device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    args |= dict(decision.prepare(**{w: args[w] for w in OPERATOR.weights}))
    alone, both = decision.function(), decision.function(beside=runtime.beside)
    layers, inputs = 6, args["x"].clone()

    def stack(fn: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = inputs
        for _ in range(layers):
            x = fn(**args | {"x": x}) * 0.5
        return x

    def copy(to: torch.Tensor, result: torch.Tensor) -> None:
        to.copy_(result)

    def captured(fn: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, Graph]:
        out = torch.empty_like(inputs)
        stack(fn)
        return out, runtime.capture(lambda: copy(out, stack(fn)), runtime.graph_pool())

    expected, one = captured(alone)
    out, two = captured(both)
    for seed in range(20):
        inputs.copy_(torch.randn(inputs.shape, generator=torch.Generator().manual_seed(seed)))
        one.replay()
        two.replay()
        runtime.synchronize()
        assert torch.equal(out, expected), f"replay {seed}"

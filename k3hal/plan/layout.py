"""How many ranks of which kind a launch group has, and the flags that say so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """A group of nodes that runs one copy of the model: `dp` data-parallel ranks of `tp` x `pp` accelerators.

    `expert_parallel` keeps whole experts on a rank, else each expert is split; either way routed experts are spread
    over `tp * dp` accelerators.
    """

    kind: str
    nodes: int
    gpus: int
    tp: int
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    @property
    def total(self) -> int:
        return self.nodes * self.gpus

    @property
    def expert_shards(self) -> int:
        return self.tp * self.dp

    @property
    def local(self) -> int:
        """Data-parallel ranks that start on one node."""
        return max(self.gpus // self.tp, 1)


def layout_of(kind: str, nodes: int, gpus: int, tp: int | None = None) -> Layout:
    """The layout of a strategy over `nodes` nodes of `gpus` accelerators; `tp` is what a recipe fixes, if it does."""
    total = nodes * gpus
    if kind == "tp_pp":
        return Layout(kind, nodes, gpus, gpus, pp=nodes)
    if kind == "tp_dp":
        return Layout(kind, nodes, gpus, gpus, dp=nodes)
    if kind == "dep":
        return Layout(kind, nodes, gpus, tp or 1, dp=total // (tp or 1), expert_parallel=True)
    return Layout(kind, nodes, gpus, tp or total, expert_parallel=kind == "tep")


def single_node_args(layout: Layout) -> list[str]:
    if layout.kind == "dep":
        return ["--data-parallel-size", str(layout.total)]
    return ["--tensor-parallel-size", str(layout.tp)]


def multi_node_args(layout: Layout, rank: int, head: str = "$HEAD_IP") -> list[str]:
    """Flags of the node `rank` of an aggregated multi-node strategy."""
    if layout.kind in ("tp", "tep", "tp_pp"):
        pp = ["--pipeline-parallel-size", str(layout.pp)] if layout.kind == "tp_pp" else []
        return ["--tensor-parallel-size", str(layout.tp), *pp, *_node_args(layout.nodes, rank, head)]
    tp = ["--tensor-parallel-size", str(layout.tp)] if layout.kind == "tp_dp" else []
    size = ["--data-parallel-size", str(layout.dp), "--data-parallel-size-local", str(layout.local)]
    start = ["--data-parallel-start-rank", str(rank * layout.local)] if rank else []
    return [*tp, *size, "--data-parallel-address", head, *start]


def role_args(layout: Layout, role: str, rank: int) -> list[str]:
    """Flags of the node `rank` of one pool of a prefill/decode cluster."""
    head = f"${role.upper()}_NODE_1"
    tp = ["--tensor-parallel-size", str(layout.tp)]
    if layout.kind != "dep":
        expert = ["--enable-expert-parallel"] if layout.expert_parallel else []
        return [*tp, *expert, *(_node_args(layout.nodes, rank, head) if layout.nodes > 1 else [])]
    sizes = ["--data-parallel-size", str(layout.dp), "--data-parallel-size-local", str(layout.local)]
    start = ["--data-parallel-start-rank", str(rank * layout.local), "--data-parallel-address", head]
    port = ["--data-parallel-rpc-port", f"${role.upper()}_DP_RPC_PORT", "--enable-expert-parallel"]
    return [*tp, *sizes, *start, *port, *(["--data-parallel-hybrid-lb"] if layout.nodes > 1 else [])]


def _node_args(nodes: int, rank: int, head: str) -> list[str]:
    worker = ["--headless"] if rank else []
    return ["--nnodes", str(nodes), "--node-rank", str(rank), "--master-addr", head, *worker]

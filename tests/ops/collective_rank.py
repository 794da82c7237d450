"""One rank of the collectives' test: `collective_rank.py FOLDER RANKS RANK` leaves its results in FOLDER/RANK.pt."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from k3hal.dispatch.ops.all_gather import all_gather
from k3hal.dispatch.ops.all_reduce import all_reduce
from k3hal.dispatch.ops.all_to_all import all_to_all
from k3hal.dispatch.ops.reduce_scatter import reduce_scatter


def main(folder: Path, ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    group = dist.group.WORLD
    x = torch.arange(8.0).view(4, 2) + 100 * rank
    wide = x.t()
    out = {
        "reduced": all_reduce(wide, group),
        "scattered": reduce_scatter(x, group, 0),
        "scattered_1": reduce_scatter(wide, group, 1),
        "gathered": all_gather(wide, group, 1),
        "gathered_0": all_gather(x, group, 0),
        "exchanged": all_to_all(x, group),
        "input": x,
    }
    torch.save(out, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

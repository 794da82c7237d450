"""How routed experts are cut into programs: what the tactics of all formats choose from."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Shape:
    """One GEMM's programs: `rows` of the weights (half gate, half up in the first GEMM), `depth` columns a step where
    weights are plain, warps and stages of the software pipeline."""

    rows: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Both GEMMs, for tiles of at most 16 choices, of 32 and of more; no tile has more than `tallest`.

    With `direct` tokens or fewer every choice is a tile of its own and nothing is sorted: few experts are chosen twice
    then, and a launch takes as long as what they would save.
    """

    few: tuple[Shape, Shape]
    some: tuple[Shape, Shape]
    many: tuple[Shape, Shape]
    tallest: int = 128
    direct: int = 4

    def shapes(self, choices: int) -> tuple[Shape, Shape]:
        return self.few if choices <= 16 else self.some if choices <= 32 else self.many


# Of 64 rows a first GEMM also holds whole groups of MXFP8, which `rounded` takes, and is Hopper's own instruction.
PACKED = Cut(
    few=(Shape(64, 128, 4, 3), Shape(64, 128, 2, 3)),
    some=(Shape(128, 128, 4, 3), Shape(128, 128, 4, 3)),
    many=(Shape(128, 128, 4, 3), Shape(128, 128, 4, 3)),
)
PLAIN = Cut(
    few=(Shape(64, 128, 4, 4), Shape(32, 128, 4, 3)),
    some=(Shape(64, 64, 4, 4), Shape(64, 64, 4, 4)),
    many=(Shape(128, 64, 8, 3), Shape(128, 64, 8, 3)),
)


def other_cuts(cut: Cut) -> dict[str, Cut]:
    """What else is worth measuring, by tactic."""
    gate, down = cut.few
    return {
        "narrow": replace(cut, few=(replace(gate, rows=32, warps=2), replace(down, rows=32, warps=2))),
        "wide": replace(cut, few=(replace(gate, rows=64), replace(down, rows=64, warps=4))),
        "deep": replace(cut, few=(replace(gate, stages=gate.stages + 2), replace(down, stages=down.stages + 1))),
        "sorted": replace(cut, direct=0),
        "short": replace(cut, tallest=64),
        "broad": replace(cut, many=(replace(cut.many[0], rows=256, warps=8), cut.many[1])),
    }

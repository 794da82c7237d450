"""`k3hal model`: make, show, list and check checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3hal.cli.common import Json
from k3hal.cli.output import print_json, stdout

if TYPE_CHECKING:
    from k3hal.model.manifest import TensorSpec

INIT_SCHEMA = "k3hal.model_init/1"
INSPECT_SCHEMA = "k3hal.model_inspect/1"
MANIFEST_SCHEMA = "k3hal.model_manifest/1"
VERIFY_SCHEMA = "k3hal.model_verify/1"

app = typer.Typer(no_args_is_help=False, help="Make, show, list and check checkpoints.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint directory.")]


@app.command()
def init(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to create.")],
    preset: Annotated[str, typer.Option("--preset", metavar="NAME", help="nano, tiny, kl-tiny or wide.")],
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the weights.")] = 0,
    layout: Annotated[
        str,
        typer.Option("--layout", metavar="NAME", help="published, or modelslim: int8, experts in int4, for Ascend."),
    ] = "published",
    force: Annotated[bool, typer.Option("--force", help="Replace the checkpoint in DIR.")] = False,
    as_json: Json = False,
) -> None:
    """Write a small checkpoint with random weights, in the published format or as msModelSlim makes them of it."""
    from k3hal.errors import UsageError
    from k3hal.model.content import LAYOUTS
    from k3hal.model.presets import PRESETS
    from k3hal.model.progress import progress_bar
    from k3hal.model.write import preset_bytes, write_preset

    if preset not in PRESETS:
        raise UsageError(f"no preset {preset!r}; expected one of {', '.join(PRESETS)}")
    chosen = LAYOUTS.get(layout)
    if chosen is None:
        raise UsageError(f"no layout {layout!r}; expected one of {', '.join(LAYOUTS)}")
    total = preset_bytes(preset, chosen)
    with progress_bar(f"writing {preset}", total) as progress:
        write_preset(preset, target, seed=seed, layout=chosen, force=force, progress=progress)
    if as_json:
        made = {"path": str(target), "preset": preset, "layout": layout, "seed": seed, "total_size": total}
        print_json(INIT_SCHEMA, made)
    else:
        typer.echo(f"{target}: {preset}, seed {seed}, {_size(total)}")


@app.command()
def inspect(folder: Folder, as_json: Json = False) -> None:
    """Show layers, parameter and byte totals, dtypes and quantisation."""
    from k3hal.model.checkpoint import Checkpoint
    from k3hal.model.summary import summarise

    summary = summarise(Checkpoint.open(folder))
    if as_json:
        print_json(INSPECT_SCHEMA, summary)
    else:
        typer.echo(_summary_text(summary))


@app.command()
def manifest(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="config.json, or a directory that holds one.")],
    as_json: Json = False,
    summary: Annotated[bool, typer.Option("--summary", help="Totals only.")] = False,
) -> None:
    """List every tensor that a checkpoint with this config must hold; of a directory in msModelSlim's layout, in it."""
    from k3hal.model.config import ModelConfig
    from k3hal.model.manifest import expected_tensors
    from k3hal.model.modelslim import ModelSlim

    slim, parsed = ModelSlim.read(config), ModelConfig.from_json(config)
    specs = list(expected_tensors(parsed) if slim is None else slim.specs(parsed))
    total = sum(spec.nbytes for spec in specs)
    if as_json:
        _print_manifest_json(total, specs, with_entries=not summary)
        return
    if not summary:
        for spec in specs:
            sys.stdout.write(f"{spec.dtype:<5} {spec.nbytes:>12} {_shape(spec.shape):<18} {spec.name}\n")
    typer.echo(f"{len(specs)} tensors, {total} bytes ({_size(total)})")


@app.command()
def verify(folder: Folder, as_json: Json = False) -> int:
    """Read a whole checkpoint and check it: index, sizes, shapes, finite values and scales, checksums.

    Exits with 1 when anything is wrong.
    """
    from k3hal.model.progress import progress_bar
    from k3hal.model.verify import shard_bytes
    from k3hal.model.verify import verify as verify_checkpoint

    with progress_bar("verifying", shard_bytes(folder)) as progress:
        result = verify_checkpoint(folder, progress)
    if as_json:
        payload: dict[str, Any] = {
            "ok": result.ok,
            "problems": list(result.problems),
            "tensors": result.tensors,
            "total_size": result.total_size,
            "checksums": result.checksums,
        }
        print_json(VERIFY_SCHEMA, payload)
    else:
        for problem in result.problems:
            typer.echo(problem)
        typer.echo(_verdict(folder, result.ok, len(result.problems), result.tensors, result.checksums))
    return 0 if result.ok else 1


def _verdict(folder: Path, ok: bool, problems: int, tensors: int, checksums: int) -> str:
    if not ok:
        return f"{folder}: {problems} problem{'s' if problems > 1 else ''}"
    sums = f"{checksums} checksums match" if checksums else "no checksums listed"
    return f"{folder}: ok, {tensors} tensors, {sums}"


def _print_manifest_json(total: int, specs: list[TensorSpec], *, with_entries: bool) -> None:
    """One entry a line, written as it goes: the full-size model has half a million."""
    out = stdout()
    head = {"schema": MANIFEST_SCHEMA, "tensors": len(specs), "total_size": total}
    out.write(json.dumps(head)[:-1])
    if with_entries:
        separator = ', "entries": [\n'
        for spec in specs:
            entry = {"name": spec.name, "dtype": spec.dtype, "shape": spec.shape, "bytes": spec.nbytes}
            out.write(separator + json.dumps(entry))
            separator = ",\n"
        out.write("\n]")
    out.write("}\n")


def _summary_text(summary: dict[str, Any]) -> str:
    dtypes = ", ".join(f"{dtype} {_size(nbytes)}" for dtype, nbytes in summary["bytes_by_dtype"].items())
    experts = summary["experts"]
    rows = [
        ("architecture", summary["architecture"]),
        ("parameters", f"{summary['parameters']:,} ({summary['active_parameters']:,} active per token)"),
        ("stored", f"{_size(summary['total_size'])} in {summary['tensors']} tensors, {summary['shards']} shards"),
        ("dtypes", dtypes),
        ("quantised", summary["quantisation"]),
        ("vocabulary", str(summary["vocab_size"])),
        ("hidden", str(summary["hidden_size"])),
        ("experts", f"{experts['count']}, top {experts['top_k']}, {experts['shared']} shared"),
    ]
    lines = [f"{label:<13} {value}" for label, value in rows]
    for layer in summary["layers"]:
        snapshot = "  AttnRes snapshot" if layer["snapshot"] else ""
        lines.append(f"layer {layer['layer']:<7} {layer['attention']} {layer['mlp']:<5}{snapshot}".rstrip())
    return "\n".join(lines + summary["notices"])


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _size(nbytes: int) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"

"""Pictures as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from k3hal.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write `path` with the suffixes .png and .svg, and return both. Raises `InputError` where that cannot be."""
    from matplotlib import rc_context

    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    try:
        with rc_context({"svg.fonttype": "none"}):  # words stay words, to be searched and read aloud
            for file in files:
                figure.savefig(file)
    except OSError as error:
        raise InputError(f"{path}: the picture cannot be written: {error.strerror or error}") from error
    return files

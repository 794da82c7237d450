"""Values of engine flags that decide about memory, read from a group's settled flags."""

from __future__ import annotations

import json
import re

from k3hal.errors import UsageError
from k3hal.plan.launch import Group

DEFAULT_UTILIZATION = 0.9
DEFAULT_BATCHED_TOKENS = 8192
DEFAULT_SEQS = 256
"""What vLLM takes where a flag is not given."""

_SUFFIX = {"": 1, "k": 1000, "K": 1024, "m": 1_000_000, "M": 1024 * 1024}


def whole(group: Group, key: str, default: int) -> int:
    """A flag's integer, with vLLM's suffixes (`32k` is 32000, `32K` 32768). Raises `UsageError` for anything else."""
    text = group.value(key)
    if text is None:
        return default
    match = re.fullmatch(r"(\d{1,12})([kKmM]?)", text)
    if not match or int(match[1]) == 0:
        raise UsageError(f"--{key} is {text!r}", hint="the planner needs a positive whole number")
    return int(match[1]) * _SUFFIX[match[2]]


def utilization(group: Group) -> float:
    """`--gpu-memory-utilization`. Raises `UsageError` outside (0, 1]."""
    text = group.value("gpu-memory-utilization")
    if text is None:
        return DEFAULT_UTILIZATION
    if not re.fullmatch(r"\d*\.?\d+", text) or not 0 < float(text) <= 1:
        raise UsageError(f"--gpu-memory-utilization is {text!r}", hint="expected a fraction in (0, 1]")
    return float(text)


def graph_mode(group: Group) -> str:
    """`cudagraph_mode` of `--compilation-config`, NONE under `--enforce-eager`, `default` where nothing says so.

    Raises `UsageError` for a configuration that is not JSON.
    """
    if group.is_on("enforce-eager"):
        return "NONE"
    text = group.value("compilation-config")
    if text is None:
        return "default"
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--compilation-config is {text!r:.60}", hint="expected JSON") from error
    mode = config.get("cudagraph_mode") if isinstance(config, dict) else None
    return mode if isinstance(mode, str) else "default"

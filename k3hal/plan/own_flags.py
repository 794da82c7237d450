"""Flags of `--set` that no server could start with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace

from k3hal.errors import UsageError
from k3hal.plan import values
from k3hal.plan.flags import Decision, Setting
from k3hal.plan.launch import Group
from k3hal.plan.layout import Layout
from k3hal.plan.refusal import RefusedPlanError

SIZES = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size"}
_VALUED = {
    *SIZES.values(),
    *("data-parallel-size-local", "decode-context-parallel-size", "max-model-len", "max-num-seqs"),
    *("max-num-batched-tokens", "gpu-memory-utilization", "kv-cache-dtype", "compilation-config"),
}
_NAME = re.compile(r"--?[A-Za-z][A-Za-z0-9._-]*")
_JSON = ("compilation-config", "speculative-config", "attention-config", "kv-transfer-config", "kv-events-config")
_CACHE_TYPES = ("auto", "bfloat16", "bf16", "float16", "fp8", "int8", "nvfp4", "turboquant")


def refuse_misspelt(settings: Iterable[Setting]) -> None:
    """Raise `UsageError` for a token that cannot be a flag's name, or names what a plan's argument is."""
    for setting in settings:
        if not _NAME.fullmatch(setting.flag):
            raise UsageError(f"--set: {setting.flag!r} is no flag", hint='write --set "--flag value"')
        if setting.key == "model":
            raise UsageError("--set cannot give --model: it is the server's first argument", hint="use --model DIR")


def refuse_unusable(decisions: Iterable[Decision]) -> None:
    """Raise `UsageError` for a flag of the user's without its value, a switch with one, or a value of another type.

    What a flag takes is known from the recipe's own use of it, and of the flags that decide about memory.
    """
    for decision in decisions:
        history = (*decision.overrode, decision.chosen)
        theirs = [setting for setting in history if setting.layer != "set"]
        for mine in (setting for setting in history if setting.layer == "set"):
            valued = mine.key in _VALUED or any(setting.value is not None for setting in theirs)
            if valued and mine.value in (None, ""):
                raise UsageError(f"--set {mine.flag}: its value is missing", hint=f'write --set "--{mine.key} VALUE"')
            if not valued and theirs and mine.value is not None:
                raise UsageError(
                    f"--set {mine.flag} {mine.value}: it is a switch, without a value",
                    hint=f"--{mine.key} or --no-{mine.key}",
                )
            _refuse_value(mine)


def settled_layout(group: Group) -> Layout:
    """The group's layout with the sizes that stand, whoever set them. Raises `RefusedPlanError` for more ranks than
    the group has accelerators."""
    layout = group.layout
    sizes = {name: values.whole(group, key, getattr(layout, name)) for name, key in SIZES.items()}
    ranks = sizes["tp"] * sizes["pp"] * sizes["dp"]
    if ranks > layout.total:
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise RefusedPlanError(f"the flags ask for {ranks} GPUs ({shown}), and the plan has {layout.total}")
    return replace(layout, **sizes)


def _refuse_value(mine: Setting) -> None:
    if mine.value is None or (mine.key == "compilation-config" and mine.value.isdecimal()):  # a level by its number
        return
    if mine.key in _JSON and not _is_object(mine.value):
        raise UsageError(f"--{mine.key} is {mine.value!r:.60}", hint="expected a JSON object")
    if mine.key == "kv-cache-dtype" and not mine.value.startswith(_CACHE_TYPES):
        raise UsageError(f"--kv-cache-dtype is {mine.value!r:.40}", hint="such as auto, bfloat16 or fp8")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False

"""A small model through the plan of an emulated machine, in a process of its own: `model_end_to_end.py MACHINE PRESET
OPS` prints what `k3hal.conform.end_to_end` finds, in bfloat16, as JSON. TRITON_INTERPRET=1 is set by who starts it."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from k3hal.conform.end_to_end import run_end_to_end
from k3hal.dispatch.emulated import PREFIX
from k3hal.model.write import write_preset


def main(machine: str, preset: str, ops: str) -> None:
    import_module(f"emulated_{machine}")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / preset
        write_preset(preset, model, seed=0)
        device = PREFIX + machine
        (found,) = run_end_to_end(preset, model, "bfloat16", device, ops or None, lambda *_: None, varied=False)
    sys.stdout.write(json.dumps({**dataclasses.asdict(found), "plan": None}))


if __name__ == "__main__":
    main(*sys.argv[1:])

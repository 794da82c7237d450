"""A backend whose only provider never answers, and writes a file (`HANGING_FILE`) once it does not."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor

from k3hal.dispatch import Backend, provides

BACKEND = Backend("hanging", (), auto=False)


@provides("silu_and_mul", name="forever")
def forever(x: Tensor) -> Tensor:
    Path(os.environ["HANGING_FILE"]).write_text("hangs", "utf-8")
    parent = os.getppid()
    while os.getppid() == parent:  # no longer than the test
        time.sleep(0.1)
    return x

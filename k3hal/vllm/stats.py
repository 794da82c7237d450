"""K3HAL's figures among vLLM's metrics: a stat logger that vLLM's front makes."""
# vLLM is installed in environments of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import StatLoggerBase

from k3hal.vllm.collect import Served, WorkerFigures
from k3hal.vllm.compat import refusal
from k3hal.vllm.names import SWITCH

_figures = WorkerFigures()


class K3HALStatLogger(StatLoggerBase):
    """Entry point `vllm.stat_logger_plugins`, once for each engine. The figures are read when `/metrics` is, not as
    vLLM steps; a server of several front processes (`--api-server-count`) collects from files of its own, without them.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        if os.environ.get(SWITCH) == "0" or refusal():
            return
        if not _figures.served:
            REGISTRY.register(_figures)
        name = vllm_config.model_config.served_model_name
        _figures.served.append(
            Served(vllm_config.instance_id, engine_index, name if isinstance(name, str) else name[0])
        )

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Nothing: the workers count."""

    def log_engine_initialized(self) -> None:
        """Nothing: the plan has been printed by the worker that made it."""

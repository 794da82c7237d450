"""The dispatch plan of a model that runs in a vLLM worker."""
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch

from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.plan import make_plan
from k3hal.dispatch.probe import probe
from k3hal.errors import UnsupportedError
from k3hal.model.config import ModelConfig
from k3hal.model.parallel import ParallelPlan
from k3hal.model.requests import model_requests
from k3hal.vllm.observe import WorkerPlace, WorkerWatch
from k3hal.vllm.sizes import CacheDtypes

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn"}


def device_of(vllm_config: Any) -> DeviceDescription:
    """The device this worker runs on. Raises as `probe`, and `UnsupportedError` for a kind that has no operators."""
    from vllm.platforms import current_platform

    kind = vllm_config.device_config.device.type
    if kind == "cpu":
        return probe("cpu")
    if kind == "cuda":
        return probe(f"{'rocm' if current_platform.is_rocm() else 'cuda'}:{torch.cuda.current_device()}")
    if kind == "npu":
        return probe(f"npu:{torch.accelerator.current_device_index()}")
    raise UnsupportedError(f"k3hal has no operators for {kind}", hint="it has some for cpu, cuda, rocm and npu")


def parallel_of(vllm_config: Any) -> ParallelPlan:
    """This worker's part of the model; vLLM's own groups are how ranks meet."""
    from vllm.distributed.communication_op import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    world = vllm_config.parallel_config.tensor_parallel_size
    if world == 1:
        return ParallelPlan()
    rank = get_tensor_model_parallel_rank()
    return ParallelPlan(rank, world, tensor_model_parallel_all_reduce, tensor_model_parallel_all_gather)


def watched_plan(cfg: ModelConfig, vllm_config: Any, dtypes: CacheDtypes, parallel: ParallelPlan) -> WorkerWatch:
    """Choose every operator, under `K3HAL_OPS`. Raises `DispatchError` for one that nothing here provides."""
    device, dtype = device_of(vllm_config), _NAMES[dtypes.conv]
    requests = model_requests(cfg, dtype, _NAMES[dtypes.kv], parallel.world, ranks=parallel.world > 1)
    plan = make_plan(requests, build_selector(), model=vllm_config.model_config.model, device=device, dtype=dtype)
    return WorkerWatch(plan, WorkerPlace.of(vllm_config, parallel.rank))

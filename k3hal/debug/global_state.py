"""The global state of a process that a provider may not change: torch's modes and flags, random states, environment."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Setting:
    """One piece of global state. `get` gives a value that compares by `==`; `shown`: the values are worth printing."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]
    shown: bool = True


class GlobalState:
    """A snapshot, taken when made, of what concerns a torch device type and the CPU."""

    def __init__(self, device_type: str) -> None:
        self._before = [(one, one.get()) for one in _settings(device_type)]

    def restore(self) -> list[str]:
        """Put back what has changed since; says what that was."""
        changed = [(one, before, now) for one, before in self._before if (now := one.get()) != before]
        # All are asked again: putting back one flag of torch sets others.
        for one, before in self._before if changed else ():
            if one.get() != before:
                one.put(before)
        return [_words(*change) for change in changed]


def _words(setting: Setting, before: Any, now: Any) -> str:
    if isinstance(before, dict):
        names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        return f"changed {setting.name}: {', '.join(names)}"
    return f"changed {setting.name}" + (f" from {before} to {now}" if setting.shown else "")


def _settings(device_type: str) -> Iterator[Setting]:
    # First, since what is allocated while others are put back lies there.
    yield Setting("torch's default device", lambda: str(torch.get_default_device()), _put_default_device)
    yield Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield Setting("torch's number of threads", torch.get_num_threads, torch.set_num_threads)
    yield Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled)
    # Nothing but the guard that turned it on can put it back, and the caller's does when it ends.
    yield Setting("inference mode", torch.is_inference_mode_enabled, lambda value: None)
    yield Setting("torch's deterministic mode", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode)
    for kind in sorted({"cpu", device_type}):
        yield from _autocast(kind)
    yield from _precision()
    yield Setting("the working directory", _folder, os.chdir)
    yield Setting("environment variables", lambda: dict(os.environ), _put_environment)
    yield from _random_states(device_type)


def _put_default_device(name: str) -> None:
    torch.set_default_device(None if name == "cpu" else name)


def _autocast(kind: str) -> Iterator[Setting]:
    yield Setting(
        f"autocast on {kind}",
        lambda: torch.is_autocast_enabled(kind),
        lambda value: torch.set_autocast_enabled(kind, value),
    )
    yield Setting(
        f"autocast's dtype on {kind}",
        lambda: torch.get_autocast_dtype(kind),
        lambda value: torch.set_autocast_dtype(kind, value),
    )


def _precision() -> Iterator[Setting]:
    """TF32 and reduced precision. The newest name of one flag is last: putting back an older one sets it too."""
    yield Setting(
        "torch's float32_matmul_precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    )
    cuda, cudnn, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
    flags = (
        ("cuda.matmul", cuda, "allow_fp16_reduced_precision_reduction"),
        ("cuda.matmul", cuda, "allow_bf16_reduced_precision_reduction"),
        ("cuda.matmul", cuda, "allow_fp16_accumulation"),
        ("cudnn", cudnn, "benchmark"),
        ("cudnn", cudnn, "deterministic"),
        ("cuda.matmul", cuda, "fp32_precision"),
        ("cudnn.conv", cudnn.conv, "fp32_precision"),
        ("mkldnn.matmul", mkldnn.matmul, "fp32_precision"),
    )
    for place, holder, name in flags:
        yield Setting(
            f"torch.backends.{place}.{name}",
            lambda holder=holder, name=name: getattr(holder, name),
            lambda value, holder=holder, name=name: setattr(holder, name, value),
        )


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return None


def _put_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def _random_states(device_type: str) -> Iterator[Setting]:
    """The global generators: a provider draws from the one it is given."""
    yield Setting("the random state of random", random.getstate, random.setstate, shown=False)
    yield Setting(
        "the random state of torch",
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda value: torch.set_rng_state(_state_tensor(value)),
        shown=False,
    )
    if device_type != "cpu":
        module = torch.get_device_module(device_type)
        yield Setting(
            f"the random state of {device_type}",
            lambda: module.get_rng_state().numpy().tobytes(),
            lambda value: module.set_rng_state(_state_tensor(value)),
            shown=False,
        )
    if numpy := sys.modules.get("numpy"):
        yield Setting(
            "the random state of numpy",
            lambda: [part.tobytes() if hasattr(part, "tobytes") else part for part in numpy.random.get_state()],
            lambda value: numpy.random.set_state((value[0], numpy.frombuffer(value[1], numpy.uint32), *value[2:])),
            shown=False,
        )


def _state_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)

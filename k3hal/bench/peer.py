"""Hugging Face transformers as a contender: its `generate` with its cache, one static batch."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from k3hal.bench.runs import Contender, Run
from k3hal.errors import UnsupportedError, UsageError
from k3hal.model.config import ModelConfig


def load_peer(name: str, folder: Path, dtype: torch.dtype) -> Contender:
    """The named peer with the checkpoint's weights in `dtype`. Raises `UsageError`, `UnsupportedError`."""
    makers: dict[str, Callable[[Path, torch.dtype], Contender]] = {"transformers": Transformers}
    if name not in makers:
        raise UsageError(f"unknown peer {name!r}", hint=f"it is {' or '.join(makers)}")
    return makers[name](folder, dtype)


class Transformers:
    """`KimiLinearForCausalLM.generate` on the CPU."""

    name = "transformers"

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Raises `UnsupportedError` where transformers cannot run this checkpoint, whole and as it is."""
        if ModelConfig.from_json(folder).architecture != "kimi_linear":
            raise UnsupportedError(
                f"transformers has no implementation of the model in {folder}",
                hint="it runs Kimi-Linear checkpoints only; make one with k3hal model init --preset kl-tiny",
            )
        try:
            module = importlib.import_module("transformers")
            model_class = module.KimiLinearForCausalLM
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                "no transformers with KimiLinearForCausalLM is installed", hint="install transformers 5.24 or newer"
            ) from error
        # Its bars and reports would stand between our lines; what matters of them is in `info`.
        module.utils.logging.disable_progress_bar()
        module.utils.logging.set_verbosity_error()
        try:
            model, info = model_class.from_pretrained(folder, dtype=dtype, output_loading_info=True)
        except RuntimeError as error:
            raise UnsupportedError(f"transformers does not load {folder}: {error}") from error
        faults = sorted(kind for kind, names in info.items() if names)
        if faults:
            # It would go on with random values in their place.
            raise UnsupportedError(f"transformers does not load {folder} cleanly: {', '.join(faults)}")
        self._model = model.eval()
        self._config_class = module.GenerationConfig

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Run:
        """All prompts have the same length, so that the static batch needs no padding.

        A token's moment is when `generate` asks whether to stop after it. Stop ids are off.
        """
        ids = torch.tensor(prompts)
        greedy = self._config_class(
            do_sample=False, max_new_tokens=num_tokens, use_cache=True, pad_token_id=0, eos_token_id=None
        )
        self._model.generation_config = greedy
        clock = _TokenClock()
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=greedy,
                stopping_criteria=[clock],
            )
        first, last = clock.moments[0], clock.moments[-1]
        return Run(
            out[:, ids.shape[1] :].tolist(),
            [first - start] * len(prompts),
            len(prompts) * (len(clock.moments) - 1),
            last - first,
        )


class _TokenClock:
    """A stopping criterion that never stops and notes when it is asked."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.moments.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

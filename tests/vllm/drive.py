"""Runs inside an interpreter that has vLLM: `drive.py JOB ANSWER`, both JSON files.

A job: `engine`, vLLM's options; `rounds`, each with `prompts` (token ids) and `max_tokens`, answered one after another
by one engine. The answer: for each round the `tokens` of each prompt and how many of its own were `cached`, and how
often sequences were preempted in all.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    from vllm.entrypoints.llm import LLM
    from vllm.platforms import current_platform
    from vllm.sampling_params import SamplingParams

    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**job["engine"])
    rounds = []
    for asked in job["rounds"]:
        params = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], params, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        rounds.append({"tokens": tokens, "cached": [output.num_cached_tokens for output in outputs]})
    preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    found = {"platform": type(current_platform).__name__, "rounds": rounds, "preempted": preempted}
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":  # vLLM's processes import this file
    main()

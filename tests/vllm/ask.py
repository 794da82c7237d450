"""Runs inside an interpreter that has vLLM: `ask.py MODEL ANSWER` chats, and asks the workers what they know."""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from pathlib import Path

CHAT = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i <|sep|>"}]}]


def main() -> None:
    from vllm.entrypoints.llm import LLM
    from vllm.sampling_params import SamplingParams

    llm = LLM(model=sys.argv[1], enforce_eager=True, max_model_len=512, max_num_seqs=2, dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (chat,) = llm.chat(CHAT, params, use_tqdm=False)
    (text,) = llm.generate("Hi<|sep|>", params, use_tqdm=False)
    plan, explained, figures = (
        llm.collective_rpc(name, args=args)
        for name, args in (("k3hal_plan", ()), ("k3hal_explain", ("rms_norm",)), ("k3hal_figures", ()))
    )
    found = {
        "chat": list(chat.prompt_token_ids),
        "text": list(text.prompt_token_ids),
        "tokens": list(text.outputs[0].token_ids),
        "said": text.outputs[0].text,
        "plan": plan,
        "explained": explained,
        "figures": figures,
    }
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":  # vLLM's processes import this file
    main()

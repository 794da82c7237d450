"""Moonshot's hosted contract, where it is narrower than ours, for `--kimi-strict-params`."""

from __future__ import annotations

from typing import Any

from k3hal.errors import RequestError
from k3hal.serve.chat_prompt import ChatPrompt
from k3hal.serve.requests import GenerationRequest


def check_hosted(prompt: ChatPrompt) -> None:
    """Raise `RequestError` for a prompt that the hosted model does not take: thinking, and a tool that is forced."""
    if prompt.tools.choice == "named" and prompt.channel == "reasoning":
        raise RequestError("tool_choice cannot name a function while thinking is on", param="tool_choice")


def fixed_sampling(asked: GenerationRequest, *, thinking: bool) -> dict[str, Any]:
    """The sampling that the hosted model always has. Raises `RequestError` for a request of anything else."""
    fixed = {
        "temperature": 1.0 if thinking else 0.6,
        "top_p": 0.95,
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    for name, value in fixed.items():
        given = getattr(asked, name)
        if given is not None and given != value:
            mode = "with" if thinking else "without"
            raise RequestError(f"{name} must be {value:g} {mode} thinking, got {given:g}", param=name)
    return fixed

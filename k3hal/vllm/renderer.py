"""vLLM's renderer for Kimi K3, with K3HAL's rendering where the tokenizer is K3HAL's."""
# vLLM is installed in environments of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.kimi_k3 import KimiK3Renderer

from k3hal.errors import RequestError
from k3hal.vllm.chat import ChatRequest, render
from k3hal.vllm.tokenizer import K3Tokenizer


class K3Renderer(KimiK3Renderer):
    """Renders a request's messages as they came, so that parts, arguments and dynamic tools are K3HAL's server's.

    A checkpoint whose own tokenizer code is trusted is rendered by that.
    """

    def render_messages(self, messages: Any, params: Any) -> tuple[list[Any], Any]:
        tokenizer = self.get_tokenizer()
        if not isinstance(tokenizer, K3Tokenizer):
            return super().render_messages(messages, params)
        return _rendered(tokenizer, messages, params)

    async def render_messages_async(self, messages: Any, params: Any) -> tuple[list[Any], Any]:
        tokenizer = self.get_tokenizer()
        if not isinstance(tokenizer, K3Tokenizer):
            return await super().render_messages_async(messages, params)
        return await asyncio.to_thread(_rendered, tokenizer, messages, params)


def _rendered(tokenizer: K3Tokenizer, messages: Any, params: Any) -> tuple[list[Any], Any]:
    template = params.get_apply_chat_template_kwargs()
    request = ChatRequest(
        messages, template.pop("tools", None), params.tool_choice, params.response_format, template=template
    )
    try:
        ids = render(request).ids(tokenizer.k3)
    except RequestError as error:
        raise VLLMValidationError(error.message, parameter=error.param) from None
    return list(messages), {"prompt_token_ids": ids}

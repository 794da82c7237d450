"""The grammar of a whole answer: the open channel to its end, the response, and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3hal.errors import RequestError
from k3hal.serve.chat_prompt import ChatPrompt
from k3hal.serve.grammar.arguments import ArgumentRules
from k3hal.serve.grammar.keywords import SchemaError
from k3hal.serve.grammar.rules import Rules, literal, regex
from k3hal.serve.grammar.schemas import SchemaReader
from k3hal.serve.response_format import ResponseFormat
from k3hal.serve.tool_checks import Tool
from k3hal.serve.xtml import escape
from k3hal.tokenizer import Tokenizer

_COMPACT = (",", ":")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in Lark's notation; `values` are those it refers to by name, see `Rules`."""

    source: str
    values: Mapping[str, tuple[str, Any]]


def answer_grammar(prompt: ChatPrompt, tokenizer: Tokenizer) -> Grammar:
    """What may be answered to `prompt`, which is constrained.

    Raises `RequestError` for a schema that cannot be followed where the request insists on it.
    """
    rules = Rules(tokenizer)
    try:
        return Grammar(rules.source(_answer(prompt, rules)), rules.values)
    except RecursionError:
        raise RequestError("the requested output is nested too deep to be enforced") from None


def is_constrained(prompt: ChatPrompt) -> bool:
    """Whether a prompt may not be answered freely: by its format, its tool choice, or a tool that is strict."""
    tools = prompt.tools
    if prompt.response_format.kind != "text" or tools.choice in ("required", "named"):
        return True
    if tools.choice == "none":
        return bool(tools.all)
    strict = any(tools.all[name]["function"].get("strict") for name in tools.allowed)
    return strict or len(tools.allowed) < len(tools.all) or bool(tools.all and not tools.parallel)


def _answer(prompt: ChatPrompt, rules: Rules) -> str:
    """The rule of the answer, which begins inside the prompt's channel.

    An answer that has to call tools closes its thinking first, come what may; any other may also open the response
    right out of it, as the model sometimes does.
    """
    tools = prompt.tools
    always = tools.choice in ("required", "named")
    called = _tools(prompt, rules) if tools.allowed else ""
    form = prompt.response_format
    body = rules.text() if form.kind == "text" else _response(form, rules)
    end = f"({rules.closing('message')})?"
    if always and form.kind != "text":
        rest = f"({body})? {rules.closing('response')} {called} {end}"
    elif always:
        rest = f"{body} {rules.closing('response')} {called} {end}"
    elif called and form.kind != "text":
        with_calls = f"{rules.closing('response')} {called} {end}"
        rest = f"({body} {rules.closing('response')} {end} | {with_calls})"
    else:
        rest = f"{body} {rules.closing('response')} {f'({called})?' if called else ''} {end}"
    if prompt.channel == "content":
        return rules.add("answer", rest)
    closed = rules.closing("think")
    closed = closed if always else f"({closed})?"
    return rules.add("answer", f"{rules.text()} {closed} {rules.opening('response')} {rest}")


def _response(form: ResponseFormat, rules: Rules) -> str:
    """The rule of a response: JSON is compact where a schema says what it holds, else spaced as the model likes."""
    if form.kind == "json_object":
        return rules.json({"type": "object"}, None)
    if form.kind == "regex":
        return rules.matching(form.value)
    if form.kind == "choice":
        return rules.any_of("choice", [literal(text) for text in form.value])
    if form.kind == "grammar":
        return rules.grammar(form.value)
    reader = SchemaReader(form.value)
    try:
        schema = reader.read()
    except SchemaError as error:
        if form.strict is False:
            return rules.json({}, None)
        raise _refusal(form.param, str(error), form.param) from None
    if form.strict and reader.unfollowed:
        raise _refusal(form.param, _unfollowed(reader), form.param)
    return rules.json(schema, _COMPACT)


def _tools(prompt: ChatPrompt, rules: Rules) -> str:
    tools = prompt.tools
    arguments = ArgumentRules(rules)
    calls = rules.any_of("call", [_call(name, tools.all[name], rules, arguments) for name in tools.allowed])
    several = tools.parallel and tools.choice != "named"
    return rules.add("tools", rules.element("tools", f"{calls}+" if several else calls))


def _call(name: str, tool: Tool, rules: Rules, arguments: ArgumentRules) -> str:
    marks = rules.marks
    head = f'{marks.open} "call tool=\\"" {literal(escape(name))} "\\" index=\\"" {regex("[1-9][0-9]{0,3}")} "\\""'
    body = _arguments(name, tool["function"], arguments)
    return rules.add("call", f"{head} {marks.sep} {body} {rules.closing('call')}")


def _arguments(name: str, function: Mapping[str, Any], arguments: ArgumentRules) -> str:
    """The rule of a tool's arguments. Without `strict` a schema beyond the grammar leaves them free."""
    schema, strict = function.get("parameters"), function.get("strict")
    if schema is None or strict is False or (not schema and not strict):
        return arguments.anything()
    what = f"the parameters of tool {name!r:.100}"
    reader = SchemaReader(schema)
    try:
        rule = arguments.of(reader)
    except SchemaError as error:
        if strict:
            raise _refusal(what, str(error), "tools") from None
        return arguments.anything()
    if strict and reader.unfollowed:
        raise _refusal(what, _unfollowed(reader), "tools")
    if not rule and strict:
        raise _refusal(what, "the schema allows no object", "tools")
    return rule or arguments.anything()


def _unfollowed(reader: SchemaReader) -> str:
    return f"strict output cannot follow {reader.unfollowed[0]}"


def _refusal(what: str, reason: str, param: str) -> RequestError:
    hint = 'leave the keyword out, or set "strict" to false' if "strict" in reason else ""
    return RequestError(f"{what} cannot be enforced: {reason}", hint=hint, param=param)

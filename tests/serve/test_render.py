"""The renderer against the pinned vectors, the rules they do not cover, and text that tries to become structure."""

import json

import pytest

from k3hal.errors import RequestError
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.serve.chat_prompt import RENDER_FIELDS, render_chat
from k3hal.tokenizer import Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def text_of(*messages, **body):
    return render_chat({"messages": list(messages), "thinking": False, **body}).text()


def call(arguments, name="f", call_id="c"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


USER = {"role": "user", "content": "hi"}


def test_every_vector_is_reproduced(shared_data):
    vectors = json.loads(shared_data("request_vectors.json").read_text())
    tokenizer = Tokenizer.from_dir(shared_data("tiktoken.model").parent)
    assert len(vectors) >= 10
    for vector in vectors:
        prompt = render_chat(vector["input"])
        assert prompt.text() == vector["text"], vector["name"]
        assert prompt.ids(tokenizer) == vector["ids"], vector["name"]


def test_the_synthetic_vector():
    ids = render_chat({"messages": [{"role": "user", "content": "Hi"}], "thinking": False}).ids(TOKENIZER)
    assert ids == [
        372, 261, 265, 266, 269, 1, 374, 39, 72, 373, 261, 374, 371, 372, 261, 265, 266, 277, 1, 374, 372, 296, 374,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "schema", "tokens"),
    [
        ("请用 JSON 格式回答：北京是中国的首都吗？答案需要包含键 capital。", False, 36),
        ("请用 JSON 格式回答：北京是中国的首都吗？答案需要包含键 capital。", True, 119),
    ],
)
def test_published_prompt_counts(shared_data, message, schema, tokens):
    """The vendor's verifier counts the prompt without the three tokens of the open channel."""
    answer = {
        "type": "object",
        "properties": {"capital": {"type": "boolean"}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    body = {"messages": [{"role": "user", "content": message}], "thinking": {"type": "disabled"}}
    if schema:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "capital_answer", "schema": answer}}
    tokenizer = Tokenizer.from_dir(shared_data("tiktoken.model").parent)
    assert len(render_chat(body).ids(tokenizer)) == tokens + 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, ""),
        ("  ", ""),
        ("{}", ""),
        ({}, ""),
        ('{"x": 1e2}', '<|open|>argument key="x" type="number"<|sep|>1e2<|close|>argument<|sep|>'),
        ('{"x": "é\\n"}', '<|open|>argument key="x" type="string"<|sep|>é\n<|close|>argument<|sep|>'),
        ('{"x": true}', '<|open|>argument key="x" type="boolean"<|sep|>true<|close|>argument<|sep|>'),
        ('{"x": null}', '<|open|>argument key="x" type="null"<|sep|>null<|close|>argument<|sep|>'),
        (
            '{"x": [1.50,{"ä":"\\""}]}',
            '<|open|>argument key="x" type="array"<|sep|>[1.50, {"ä": "\\""}]<|close|>argument<|sep|>',
        ),
        ({"x": {"y": 2}}, '<|open|>argument key="x" type="object"<|sep|>{"y": 2}<|close|>argument<|sep|>'),
        ('{"a\\"&": 1}', '<|open|>argument key="a&quot;&amp;" type="number"<|sep|>1<|close|>argument<|sep|>'),
        ("NaN", '<|open|>json type="object"<|sep|>NaN<|close|>json<|sep|>'),
    ],
)
def test_call_arguments(arguments, expected):
    text = text_of(USER, assistant(call(arguments)))
    start = '<|open|>call tool="f" index="1"<|sep|>'
    assert text.partition(start)[2].startswith(expected + "<|close|>call<|sep|>")


@pytest.mark.parametrize("arguments", ["[1]", "3", '"text"', 7, ["x"]])
def test_arguments_that_are_not_an_object_are_refused(arguments):
    with pytest.raises(
        RequestError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments must be a JSON object"
    ):
        text_of(USER, assistant(call(arguments)))


def test_reasoning_is_found_under_both_names_and_never_omitted():
    both = [
        render_chat({"messages": [USER, {"role": "assistant", "content": "x", field: "why"}, USER]}).text()
        for field in ("reasoning_content", "reasoning")
    ]
    assert both[0] == both[1]
    blank = render_chat({"messages": [USER, {"role": "assistant", "content": "x", "reasoning": " \n"}]}).text()
    assert "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>x" in blank
    off = text_of(USER, {"role": "assistant", "content": "x", "reasoning_content": "why"})
    assert "think" not in off


def test_unmatched_tool_results_stay_as_received():
    calls = assistant(call("{}", "f", "1"), call("{}", "g", "2"))
    text = text_of(
        USER,
        calls,
        {"role": "tool", "tool_call_id": "2", "content": "second"},
        {"role": "tool", "tool_call_id": "unknown", "content": "other"},
    )
    assert 'tool="f" index="1"<|sep|>second' in text
    assert 'tool="g" index="2"<|sep|>other' in text


def test_tool_index_counts_on_past_a_user_message_and_restarts_at_an_assistant():
    calls = assistant(call("{}", "f", "1"), call("{}", "g", "2"))
    second = {"role": "tool", "tool_call_id": "2", "content": "b"}
    text = text_of(USER, calls, {"role": "tool", "tool_call_id": "1", "content": "a"}, USER, second)
    assert 'tool="g" index="2"<|sep|>b' in text
    text = text_of(USER, calls, second, assistant(call("{}", "h", "3")), {"role": "tool", "tool_call_id": "3"})
    assert 'tool="h" index="1"<|sep|><|close|>' in text


def test_dynamic_tools_text_parts_names_and_developer():
    text = text_of(
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": "", "tools": [TOOL]},
        {"role": "user", "name": 'x"&', "content": " hi "},
    )
    assert text.startswith('<|open|>message role="system"<|sep|>ab<|close|>')
    assert '<|open|>message role="system" type="tool-declare"<|sep|>## New Tools Available\n' in text
    assert '<|open|>message role="user" name="x&quot;&amp;"<|sep|> hi <|close|>' in text


def test_partial_continues_the_last_assistant_message():
    body = {"messages": [USER, {"role": "assistant", "content": "Once", "partial": True}], "thinking_effort": None}
    prompt = render_chat(body)
    assert prompt.channel == "content"
    assert prompt.text().endswith(
        'role="assistant"<|sep|><|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>Once'
    )


@pytest.mark.parametrize(
    ("body", "effort"),
    [
        ({}, "max"),
        ({"thinking_effort": None}, None),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": None}, "max"),
        ({"reasoning_effort": "none"}, "off"),
        ({"reasoning_effort": "none", "thinking": True}, "max"),
        ({"reasoning_effort": "low", "thinking_effort": "high"}, "high"),
        ({"reasoning_effort": "low", "thinking": {"type": "enabled", "effort": "high"}}, "high"),
        ({"thinking": {"type": "disabled"}}, "off"),
        ({"thinking": {}}, "max"),
        ({"thinking": {"effort": "low"}, "enable_thinking": True}, "low"),
        ({"thinking": {"type": "adaptive", "keep": "all"}}, "max"),
        ({"chat_template_kwargs": {"thinking": False, "preserve_thinking": True}}, "off"),
        ({"chat_template_kwargs": {"thinking_effort": "low"}}, "low"),
        ({"enable_thinking": False}, "off"),
    ],
)
def test_thinking_spellings(body, effort):
    prompt = render_chat({"messages": [USER], **body})
    assert prompt.channel == ("content" if effort == "off" else "reasoning")
    note = f"invoked with `thinking_effort={effort}`"
    assert ('type="thinking-effort"' in prompt.text()) == (effort not in ("off", None))
    assert effort in ("off", None) or note in prompt.text()


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


def allowed(*names, mode="auto"):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool(n) for n in names]}}


def schema_format(**fields):
    return {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": fields}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "bot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "", "name": 3}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "", "tools": [TOOL]}]}, "messages[0].tools"),
        ({"messages": [{"role": "system", "content": "x", "tools": [TOOL]}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "tool_call_id": "x", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.name"),
        ({"messages": [{"role": "assistant", "reasoning_content": 1}]}, "messages[0].reasoning_content"),
        ({"messages": [{"role": "assistant", "partial": True}, USER]}, "messages[0].partial"),
        ({"messages": [{"role": "user", "content": "", "partial": True}]}, "messages[0].partial"),
        ({"messages": [{"role": "assistant", "partial": 1}]}, "messages[0].partial"),
        ({"messages": [assistant(call("{}"), partial=True)]}, "messages[0].partial"),
        ({"messages": [{"role": "assistant", "partial": True, "tools": [TOOL]}]}, "messages[0].tools"),
        ({"messages": [{"role": "assistant", "partial": True, "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "tool_call_id": "x", "name": "f", "tools": [TOOL]}]}, "messages[0].tools"),
        ({"messages": [USER], "tools": {}}, "tools"),
        ({"messages": [USER], "tools": [1]}, "tools[0]"),
        ({"messages": [USER], "tools": [{"type": "f"}]}, "tools[0].type"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [USER], "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"messages": [USER], "tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"messages": [USER], "tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"messages": [USER], "tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"messages": [{"role": "system", "tools": [TOOL]}, USER], "tools": [TOOL]},
         "messages[0].tools[0].function.name"),
        ({"messages": [USER], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": [USER], "tools": [TOOL], "tool_choice": allowed("f", mode="none")},
         "tool_choice.allowed_tools.mode"),
        ({"messages": [USER], "tools": [TOOL], "tool_choice": allowed()}, "tool_choice.allowed_tools.tools"),
        ({"messages": [USER], "tools": [TOOL], "tool_choice": allowed("f", "g")},
         "tool_choice.allowed_tools.tools[1]"),
        ({"messages": [USER], "tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [USER], "tool_choice": "any"}, "tool_choice"),
        ({"messages": [USER], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"messages": [USER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"messages": [USER], "response_format": {"type": "xml"}}, "response_format"),
        ({"messages": [USER], "response_format": "json"}, "response_format"),
        ({"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (schema_format(schema={}), "response_format.json_schema.name"),
        (schema_format(name="r"), "response_format.json_schema.schema"),
        (schema_format(name="r", schema={}, strict=1), "response_format.json_schema.strict"),
        ({"messages": [USER], "thinking_effort": "medium"}, "thinking_effort"),
        ({"messages": [USER], "reasoning_effort": "minimal"}, "reasoning_effort"),
        ({"messages": [USER], "thinking": {"type": "on"}}, "thinking.type"),
        ({"messages": [USER], "thinking": "yes"}, "thinking"),
        ({"messages": [USER], "thinking": {"keep": "none"}}, "thinking.keep"),
        ({"messages": [USER], "thinking": {"effort": "medium"}}, "thinking.effort"),
        ({"messages": [USER], "chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"messages": [USER], "chat_template_kwargs": {"preserve_thinking": False}},
         "chat_template_kwargs.preserve_thinking"),
    ],
)  # fmt: skip
def test_malformed_requests_name_the_field(body, param):
    with pytest.raises(RequestError) as caught:
        render_chat(body)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


def test_deep_nesting_is_refused_not_a_crash():
    deep = {}
    for _ in range(5000):
        deep = {"x": deep}
    with pytest.raises(RequestError, match="nested too deep"):
        text_of(USER, assistant(call(deep)))


def test_accepted_schema_is_rendered_sorted():
    schema = {"name": "r", "schema": {"b": 1, "a": [{"d": 1, "c": "é"}]}}
    text = text_of(USER, response_format={"type": "json_schema", "json_schema": schema})
    assert '```json\n{"a":[{"c":"é","d":1}],"b":1}\n```' in text


def test_the_fields_that_shape_a_prompt_are_listed():
    class Recording(dict):
        def get(self, key, default=None):
            read.add(key)
            return super().get(key, default)

        def __contains__(self, key):
            read.add(key)
            return super().__contains__(key)

    read = set()
    render_chat(Recording(messages=[{"role": "user", "content": "Hi"}]))
    assert read == set(RENDER_FIELDS)

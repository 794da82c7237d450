"""Image parts: sizes read from headers, tokens per image, and their place in the prompt."""

import base64
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.errors import RequestError
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.serve.chat_prompt import render_chat
from k3hal.serve.image_size import image_size
from k3hal.serve.images import image_tokens
from k3hal.tokenizer import MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD, Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 640, 480) + b"rest"
JPEG = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xff\xc2\x00\x11\x08" + struct.pack(">HH", 480, 640)


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [
        (1, 1, 1),
        (28, 28, 1),
        (29, 28, 2),
        (640, 480, 414),
        (1536, 1024, 2035),
        (1920, 1080, 2691),
        (3840, 2160, 10764),
        (4096, 4096, 16641),
        (10000, 100, 768),
        (8000, 6000, 16428),
    ],
)
def test_tokens_of_an_image(width, height, tokens):
    assert image_tokens(width, height) == tokens


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 1 << 31), st.integers(1, 1 << 31))
def test_no_image_takes_more_than_the_patch_budget_and_its_rounding(width, height):
    assert 1 <= image_tokens(width, height) <= 65536 // 4 + 2 * 256 + 1


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (PNG, (640, 480)),
        (JPEG, (640, 480)),
        (b"GIF89a" + struct.pack("<HH", 3, 5), (3, 5)),
        (b"BM" + bytes(16) + struct.pack("<ii", 7, -9), (7, 9)),
        (b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + b"\x7f\x02\x00\xdf\x01\x00", (640, 480)),
        (b"RIFF\0\0\0\0WEBPVP8L" + bytes(4) + b"\x2f" + struct.pack("<I", 639 | 479 << 14), (640, 480)),
        (b"RIFF\0\0\0\0WEBPVP8 " + bytes(7) + b"\x9d\x01\x2a" + struct.pack("<HH", 640, 480), (640, 480)),
        (b"", None),
        (b"<svg/>", None),
        (b"\xff\xd8\xff\xc4\x00\x04ab\x00", None),
    ],
)
def test_sizes_are_read_from_the_header(data, size):
    assert image_size(data) == size


@pytest.mark.parametrize("whole", [PNG[:24], JPEG])
def test_a_header_cut_anywhere_has_no_size(whole):
    assert image_size(whole) is not None
    assert [image_size(whole[:end]) for end in range(len(whole))] == [None] * len(whole)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([PNG, JPEG, b"GIF89a", b"RIFF\0\0\0\0WEBPVP8X", b"BM"]), st.binary(max_size=64))
def test_damaged_headers_never_raise(start, rest):
    size = image_size(start[:12] + rest)
    assert size is None or len(size) == 2


def part(url, kind="image_url"):
    return {"type": kind, kind: {"url": url, "detail": "low"} if kind == "image_url" else url}


def data_url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize("kind", ["image_url", "image"])
def test_an_image_stands_where_its_part_stands(kind):
    content = [{"type": "text", "text": "a"}, part(data_url(PNG), kind), {"type": "text", "text": "b"}]
    prompt = render_chat({"messages": [{"role": "user", "content": content}]}, images=True)
    head = f"a{MEDIA_BEGIN}image 640x480{MEDIA_CONTENT}"
    assert head + MEDIA_PAD * 414 + MEDIA_END + "b<|close|>" in prompt.text()
    ids = prompt.ids(TOKENIZER)
    assert ids.count(TOKENIZER.special(MEDIA_PAD)) == sum(image.tokens for image in prompt.images) == 414
    assert prompt.images[0].data == PNG


def test_tool_results_and_answers_may_hold_images():
    image = [part(data_url(b"GIF89a" + struct.pack("<HH", 3, 5)))]
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": image, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": image},
    ]
    prompt = render_chat({"messages": messages}, images=True)
    shown = f"{MEDIA_BEGIN}image 3x5{MEDIA_CONTENT}{MEDIA_PAD}{MEDIA_END}"
    assert f'<|open|>message role="tool" tool="f" index="1"<|sep|>{shown}<|close|>' in prompt.text()
    assert f"<|open|>response<|sep|>{shown}<|close|>response" in prompt.text()
    assert len(prompt.images) == 2


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (part("https://example.com/a.png"), "must be a data:image"),
        (part("data:text/plain;base64,aGk="), "must be a data:image"),
        (part("data:image/png;base64,a*b="), "is not valid base64"),
        (part(data_url(b"no image")), "is no complete PNG"),
        (part(data_url(b"GIF89a\0\0\0\0")), "is no complete PNG"),
        ({"type": "image_url"}, "must hold the image's url"),
        (part(3), "must hold the image's url"),
    ],
)
def test_what_is_no_image_is_refused_by_name(image, message):
    with pytest.raises(RequestError, match=message) as caught:
        render_chat({"messages": [{"role": "user", "content": [image]}]}, images=True)
    assert caught.value.param == "messages[0].content[0].image_url"


def test_a_text_only_server_answers_400(api):
    body = {"messages": [{"role": "user", "content": [part(data_url(PNG))]}]}
    answer = api.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[0]")

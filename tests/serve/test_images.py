"""Image parts: sizes read from headers, tokens per image, and their place in the prompt."""

import io
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.errors import RequestError
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.serve.chat_prompt import render_chat
from k3hal.serve.media.headers import read_header
from k3hal.serve.media.images import Images, image_tokens
from k3hal.serve.media.rules import MediaRules
from k3hal.tokenizer import MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD, Tokenizer

from .pictures import chat_part, data_url, gif, png

TOKENIZER = Tokenizer(synthetic_ranks())
PNG = png(640, 480)
FRAME = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xff\xc2\x00\x11\x08" + struct.pack(">HH", 480, 640)
JPEG = FRAME + bytes(10) + b"\xff\xda\x00\x02pixels\xff\xd9"


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
        (b"BM" + bytes(16) + struct.pack("<ii", 7, -9), None),
        (b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + b"\x7f\x02\x00\xdf\x01\x00", (640, 480)),
        (b"RIFF\0\0\0\0WEBPVP8L" + bytes(4) + b"\x2f" + struct.pack("<I", 639 | 479 << 14), (640, 480)),
        (b"RIFF\0\0\0\0WEBPVP8 " + bytes(7) + b"\x9d\x01\x2a" + struct.pack("<HH", 640, 480), (640, 480)),
        (b"", None),
        (b"<svg/>", None),
        (b"\xff\xd8\xff\xc4\x00\x04ab\x00", None),
    ],
)
def test_sizes_are_read_from_the_header(data, size):
    header = read_header(data)
    assert (header and (header.width, header.height)) == size


@pytest.mark.parametrize("whole", [PNG[:24], FRAME])
def test_a_header_cut_anywhere_has_no_size(whole):
    assert read_header(whole) is not None
    assert [read_header(whole[:end]) for end in range(len(whole))] == [None] * len(whole)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([PNG, FRAME, b"GIF89a", b"RIFF\0\0\0\0WEBPVP8X", b"BM"]), st.binary(max_size=64))
def test_damaged_headers_never_raise(start, rest):
    header = read_header(start[:12] + rest)
    assert header is None or min(header.width, header.height) >= 0


@pytest.mark.parametrize("whole", [PNG, JPEG, gif(3, 5)])
def test_a_file_cut_anywhere_is_not_whole(whole):
    header = read_header(whole)
    assert header is not None and header.whole
    cut = [read_header(whole[:end]) for end in range(len(whole))]
    assert [header for header in cut if header is not None and header.whole] == []


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "webp"])
def test_what_an_encoder_writes_is_read_whole(kind):
    pillow = pytest.importorskip("PIL.Image", reason="needs Pillow")
    out = io.BytesIO()
    pillow.effect_noise((123, 45), 50).save(out, kind)
    assert read_header(out.getvalue()) == (f"image/{kind}", 123, 45, True)
    for share in (0.3, 0.6, 0.9):
        cut = read_header(out.getvalue()[: int(len(out.getvalue()) * share)])
        assert cut is not None and not cut.whole


@pytest.mark.parametrize("kind", ["image_url", "image"])
def test_an_image_stands_where_its_part_stands(kind):
    content = [{"type": "text", "text": "a"}, chat_part(data_url(PNG), kind), {"type": "text", "text": "b"}]
    prompt = render_chat({"messages": [{"role": "user", "content": content}]}, images=Images())
    head = f"a{MEDIA_BEGIN}image 640x480{MEDIA_CONTENT}"
    assert head + MEDIA_PAD * 414 + MEDIA_END + "b<|close|>" in prompt.text()
    ids = prompt.ids(TOKENIZER)
    assert ids.count(TOKENIZER.special(MEDIA_PAD)) == sum(image.tokens for image in prompt.images) == 414
    assert prompt.images[0].data == PNG


def test_tool_results_and_answers_may_hold_images():
    image = [chat_part(data_url(gif(3, 5)))]
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": image, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": image},
    ]
    prompt = render_chat({"messages": messages}, images=Images())
    shown = f"{MEDIA_BEGIN}image 3x5{MEDIA_CONTENT}{MEDIA_PAD}{MEDIA_END}"
    assert f'<|open|>message role="tool" tool="f" index="1"<|sep|>{shown}<|close|>' in prompt.text()
    assert f"<|open|>response<|sep|>{shown}<|close|>response" in prompt.text()
    assert len(prompt.images) == 2


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (chat_part("https://example.com/a.png"), "must be a data:image"),
        (chat_part("ftp://example.com/a.png"), "must be a data:image"),
        (chat_part("a.png"), "must be a data:image"),
        (chat_part(""), "must be a data:image"),
        (chat_part("data:"), "must be a data:image"),
        (chat_part("data:image/png,a"), "must be a data:image"),
        (chat_part("data:text/plain;base64,aGk="), "must be a data:image"),
        (chat_part("data:image/png;base64,a*b="), "is not valid base64"),
        (chat_part("data:image/png;base64,abc"), "is not valid base64"),
        (chat_part("data:image/png;base64,ab\ncd"), "is not valid base64"),
        (chat_part("data:image/png;base64,é"), "is not valid base64"),
        (chat_part("data:image/png;base64,"), "is no complete PNG"),
        (chat_part(data_url(b"no image")), "is no complete PNG"),
        (chat_part(data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml")), "is no complete PNG"),
        (chat_part(data_url(b"<!doctype html>")), "is no complete PNG"),
        (chat_part(data_url(b"BM" + bytes(60), "image/bmp")), "is no complete PNG"),
        (chat_part(data_url(PNG[:-1])), "is no complete PNG"),
        (chat_part(data_url(gif(0, 5))), "is no complete PNG"),
        (chat_part(data_url(png(100_000, 100_000))), "has 100000x100000 pixels"),
        (chat_part(data_url(png(1 << 13, (1 << 13) + 1))), "has 8192x8193 pixels"),
        ({"type": "image_url"}, "must hold the image's url"),
        (chat_part(3), "must hold the image's url"),
    ],
)
def test_what_is_no_image_is_refused_by_name(image, message):
    with pytest.raises(RequestError, match=message) as caught:
        render_chat({"messages": [{"role": "user", "content": [image]}]}, images=Images())
    assert caught.value.param == "messages[0].content[0].image_url"


def render(*urls, **rules):
    content = [chat_part(url) for url in urls]
    return render_chat({"messages": [{"role": "user", "content": content}]}, images=Images(MediaRules(**rules)))


@pytest.mark.parametrize("start", ["data:", "DATA:", "Data:"])
@pytest.mark.parametrize("mime", ["image/png", "IMAGE/PNG", "image/jpeg", "image/png;name=a.png"])
def test_the_bytes_say_what_an_image_is_whatever_its_url_says(start, mime):
    prompt = render(start + data_url(PNG, mime).removeprefix("data:"))
    assert [(image.mime, image.width) for image in prompt.images] == [("image/png", 640)]


def test_bounds_of_a_request():
    url, size = data_url(PNG), len(PNG)
    assert len(render(url, url, max_images=2, max_bytes=size).images) == 2
    with pytest.raises(RequestError, match="one image too many: a request may have 2") as caught:
        render(url, url, url, max_images=2)
    assert caught.value.param == "messages[0].content[2]"
    for most in (size - 1, size - 2, 1):
        with pytest.raises(RequestError, match=f"more than {most} bytes"):
            render(url, max_bytes=most)


def test_a_text_only_server_answers_400(api):
    body = {"messages": [{"role": "user", "content": [chat_part(data_url(PNG))]}]}
    answer = api.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[0]")

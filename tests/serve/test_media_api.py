"""Images through a real server whose engine takes them: every API, placeholders, cache keys, and refusals."""

import hashlib
import json

import anthropic
import httpx
import openai
import pytest
from pydantic import ValidationError

from k3hal.engine.replay import ReplayEngine
from k3hal.model.synthetic_vocab import synthetic_ranks, synthetic_vocab_bytes
from k3hal.serve.media.fetch import MediaFetcher
from k3hal.serve.media.rules import Domain, MediaRules
from k3hal.serve.settings import ServeSettings
from k3hal.tokenizer import MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD, Tokenizer

from .pictures import chat_part, data_url, gif, png
from .sites import Site, http

TOKENIZER = Tokenizer(synthetic_ranks())
PNG, GIF = png(640, 480), gif(29, 28)
SHOWN = f"{MEDIA_BEGIN}image 640x480{MEDIA_CONTENT}" + MEDIA_PAD * 414 + MEDIA_END


class Recording(ReplayEngine):
    """A replay that keeps the requests it got."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.requests = []

    def submit(self, request):
        super().submit(request)
        self.requests.append(request)


class Seeing:
    def __init__(self, server, engine, site):
        self.http = server.client()
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        self.site = site
        self.url = f"http://example.com:{site.port}"
        self._engine = engine

    def taken(self):
        """The one request that the engine got since the last call."""
        (request,) = self._engine.requests
        self._engine.requests.clear()
        return request

    def asked_nothing(self):
        assert self._engine.requests == []

    def refused(self, path, body):
        response = self.http.post(path, json=body)
        self.asked_nothing()
        assert response.status_code == 400, response.text
        return response.json()["error"]


@pytest.fixture(scope="module")
def seeing(serving, turn):
    """A server whose engine takes images, and which may fetch some from example.com: a site of this machine."""
    site = Site()
    rules = MediaRules((Domain("example.com", site.port),), max_images=3, timeout=2.0)
    engine = Recording([turn("I look.", "A square.")], TOKENIZER, takes_images=True)
    with serving(engine, TOKENIZER, media=rules) as server:
        server.state.media = MediaFetcher(rules, resolve=site.resolve, public=lambda _: True)
        client = Seeing(server, engine, site)
        yield client
        for used in (client.http, client.openai, client.anthropic):
            used.close()
    site.close()


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def text(value):
    return {"type": "text", "text": value}


def check(request, *images):
    """The prompt of `request` has these (file, mime, size, tokens), each at its place, and its keys know them."""
    pad = TOKENIZER.special(MEDIA_PAD)
    assert [(i.data, i.mime, (i.width, i.height), i.tokens) for i in request.images] == list(images)
    ids = list(request.prompt_token_ids)
    assert ids.count(pad) == sum(image[3] for image in images)
    for image in request.images:
        assert ids[image.position : image.position + image.tokens] == [pad] * image.tokens
        assert ids[image.position - 1] == TOKENIZER.special(MEDIA_CONTENT)
        assert ids[image.position + image.tokens] == TOKENIZER.special(MEDIA_END)
    keys = tuple((image.position, hashlib.sha256(image.data).digest()) for image in request.images)
    assert request.context.media == keys


IMAGE, SMALL = (PNG, "image/png", (640, 480), 414), (GIF, "image/gif", (29, 28), 2)


def test_a_chat(seeing):
    content = [text("a"), chat_part(data_url(PNG)), text("b"), chat_part(data_url(GIF))]
    answer = seeing.openai.chat.completions.create(model="k3", messages=user(*content), stream=False)
    assert answer.choices[0].message.content == "A square."
    request = seeing.taken()
    check(request, IMAGE, SMALL)
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    rendered = seeing.http.post("/v1/chat/completions/render", json={"messages": user(*content)}).json()
    assert rendered["token_ids"] == list(request.prompt_token_ids)
    assert f"a{SHOWN}b{MEDIA_BEGIN}image 29x28" in rendered["text"]
    chunks = seeing.openai.chat.completions.create(model="k3", messages=user(*content), stream=True, n=2)
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == 1)
        == "A square."
    )


def test_messages(seeing):
    seeing._engine.requests.clear()
    base64 = {"type": "base64", "media_type": "image/png", "data": data_url(PNG).partition(",")[2]}
    seeing.site.answers["a.gif"] = http(GIF)
    url = {"type": "url", "url": f"{seeing.url}/a.gif"}
    messages = [
        *user({"type": "image", "source": base64}, text("What?")),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
        *user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": url}]}),
    ]
    answer = seeing.anthropic.messages.create(model="k3", max_tokens=99, messages=messages)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    request = seeing.taken()
    check(request, IMAGE, SMALL)
    count = seeing.anthropic.messages.count_tokens(model="k3", messages=messages)
    assert count.input_tokens == len(request.prompt_token_ids)


def test_responses(seeing):
    part = {"type": "input_image", "image_url": data_url(PNG), "detail": "auto"}
    first = seeing.openai.responses.create(model="k3", input=user(part, {"type": "input_text", "text": "What?"}))
    assert first.output_text == "A square."
    check(seeing.taken(), IMAGE)
    seeing.openai.responses.create(model="k3", input="And now?", previous_response_id=first.id)
    check(seeing.taken(), IMAGE)


def test_an_image_of_another_server(seeing):
    seeing.site.answers |= {"a.png": http(PNG, "Content-Type: text/html"), "b.gif": http(GIF)}
    seeing.site.heads.clear()
    parts = [chat_part(f"{seeing.url}/{name}") for name in ("a.png", "b.gif", "a.png")]
    seeing.openai.chat.completions.create(model="k3", messages=user(*parts))
    check(seeing.taken(), IMAGE, SMALL, IMAGE)
    assert len(seeing.site.heads) == 2


def test_what_is_not_an_image_is_refused_by_name(seeing):
    seeing.site.answers |= {"page": http(b"<!doctype html>", "Content-Type: image/png"), "cut": http(PNG[:-4])}
    for url, message in [
        (f"{seeing.url}/page", "is no complete PNG"),
        (f"{seeing.url}/cut", "is no complete PNG"),
        ("https://evil.test/a.png", "not among the allowed media domains"),
        ("http://169.254.169.254/latest/meta-data", "not among the allowed media domains"),
        (data_url(PNG[:40]), "is no complete PNG"),
        (data_url(png(100_000, 100_000)), "pixels"),
        ("data:image/png;base64,!", "not valid base64"),
    ]:
        error = seeing.refused("/v1/chat/completions", {"messages": user(text("a"), chat_part(url))})
        assert error["param"] == "messages[0].content[1].image_url"
        assert message in error["message"] and "\n" not in error["message"]


def test_errors_have_the_names_of_the_api_that_was_asked(seeing):
    url = f"{seeing.url}/page"
    seeing.site.answers["page"] = http(b"", status="404 Not Found")
    where = f"cannot be fetched from example.com:{seeing.site.port}: it answered 404"
    part = {"type": "input_image", "image_url": url}
    error = seeing.refused("/v1/responses", {"input": user(part)})
    assert (error["param"], error["message"]) == ("input[0].content[0].image_url", f"{error['param']} {where}")
    image = {"type": "image", "source": {"type": "url", "url": url}}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("x"), image]}
    for messages, place in [
        (user(text("x"), image), "messages[0].content[1].source"),
        ([call, *user(result)], "messages[1].content[0].content[1].source"),
    ]:
        error = seeing.refused("/v1/messages", {"model": "k3", "max_tokens": 9, "messages": messages})
        assert error["message"] == f"{place} {where}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "source.type must be base64 or url"),
        ({"type": "file", "file_id": "f"}, "source.type must be base64 or url"),
        ({"type": []}, "source.type must be base64 or url"),
        ({"type": "url"}, "source.url must be a text"),
        ({"type": "base64", "media_type": "image/png"}, "source.data must be a text"),
        ({"type": "base64", "data": ""}, "source.media_type must be a text"),
        ({"type": "base64", "media_type": "image/png;base64,", "data": ""}, "is not valid base64"),
        ({"type": "base64", "media_type": "application/pdf", "data": "aGk="}, "must be a data:image"),
    ],
)
def test_sources_of_messages(seeing, source, message):
    body = {"model": "k3", "max_tokens": 9, "messages": user({"type": "image", "source": source})}
    assert message in seeing.refused("/v1/messages", body)["message"]


def test_nothing_is_fetched_for_a_request_that_is_wrong_elsewhere(seeing):
    seeing.site.heads.clear()
    far = chat_part(f"{seeing.url}/a.png")
    for body, param in [
        ({"messages": user(far, {"type": "video"})}, "messages[0].content[1]"),
        ({"messages": user(far), "response_format": {"type": "x"}}, "response_format"),
        ({"messages": user(far), "temperature": -1}, "temperature"),
        ({"messages": user(far, far, far, far)}, "messages[0].content[3]"),
        ({"messages": user(far, chat_part("data:,"))}, "messages[0].content[1].image_url"),
    ]:
        assert seeing.refused("/v1/chat/completions", body)["param"] == param
    assert seeing.site.heads == []


def test_a_server_fetches_nothing_unless_it_is_told_to(serving, turn):
    engine = ReplayEngine([turn("", "ok")], TOKENIZER, takes_images=True)
    with serving(engine, TOKENIZER) as server, server.client() as http:
        asked = http.post("/v1/chat/completions", json={"messages": user(chat_part("https://example.com/a.png"))})
        assert asked.status_code == 400 and "must be a data:image" in asked.json()["error"]["message"]
        asked = http.post("/v1/chat/completions", json={"messages": user(chat_part(data_url(GIF)))})
        assert asked.json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("url", [data_url(PNG), "https://example.com/a.png", "data:,", "nonsense", 3, None])
def test_a_server_of_text_says_so_first(api, url):
    body = {"messages": user(text("a"), chat_part(url))}
    answer = api.http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[0].content[1]")
    assert error["message"] == "messages[0].content[1] is an image, but the served model takes text only"


def test_the_command(k3hal, tmp_path, turn):
    (tmp_path / "tiktoken.model").write_bytes(synthetic_vocab_bytes())
    file = tmp_path / "answers.jsonl"
    file.write_text('{"takes_images": true}\n' + json.dumps({"ids": turn("", "A square.").ids}) + "\n")
    flags = ["--allowed-media-domain", "example.com", "--max-media-bytes", "500", "--media-timeout", "2"]
    replay = ["serve", "--port", "0", "--engine", f"replay:{file}", "--tokenizer", tmp_path, "--max-images", "1"]
    command = k3hal(*replay, *flags)
    try:
        line = command.process.stdout.readline()
        url = line.split(" on ")[1].split(" ")[0]
        for parts, status, words in [
            ([data_url(GIF)], 200, "A square."),
            ([data_url(GIF)] * 2, 400, "a request may have 1"),
            ([data_url(png(2, 2) + bytes(500))], 400, "more than 500 bytes"),
            (["http://evil.test/a.png"], 400, "nothing is fetched from evil.test"),
        ]:
            body = {"messages": user(*map(chat_part, parts)), "thinking": False}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
            assert answer.status_code == status and words in answer.text
    finally:
        command.process.terminate()
        code, _, errors = command.finish()
    assert (code, errors) == (0, "")


@pytest.mark.parametrize(
    "values",
    [{"allowed_media_domain": [""]}, {"allowed_media_domain": "a.test/b"}, {"max_images": 0}, {"max_media_bytes": -1},
     {"media_timeout": 0}],
)  # fmt: skip
def test_settings_that_make_no_sense(values):
    with pytest.raises(ValidationError) as caught:
        ServeSettings(**values)
    assert caught.value.errors()[0]["loc"][0] == next(iter(values))


def test_a_flag_that_makes_no_sense_is_one_line(k3hal):
    code, _, errors = k3hal("serve", "--allowed-media-domain", "https://a.test").finish()
    assert code == 4 and "is not HOST or HOST:PORT" in errors and len(errors.splitlines()) == 1

"""Fetching images: what an honest server's answer becomes, and every other answer a refusal in time and bounds."""

import asyncio
import ssl
import subprocess
import time

import pytest

from k3hal.errors import RequestError
from k3hal.serve.media.fetch import MediaFetcher
from k3hal.serve.media.rules import Domain, MediaRules
from k3hal.serve.media.urls import read_remote
from k3hal.serve.server import tls_context

from .pictures import png
from .sites import Site, http

PNG = png(3, 5)
CHUNKS = b"%x\r\n%b\r\n5\r\n%b\r\n0\r\n\r\n" % (len(PNG) - 5, PNG[:-5], PNG[-5:])
FIELD = "messages[0].content[0].image_url"


@pytest.fixture
def site():
    site = Site()
    yield site
    site.close()


@pytest.fixture
def fetch(site):
    """`fetch(*names)`: the bytes of these paths of example.com, which is the site. Fields are `a`, `b`, …"""

    def get(*names, host="example.com", public=lambda _: True, resolve=site.resolve, **rules):
        bounds = MediaRules(
            **{"domains": (Domain("example.com", site.port), Domain("[::1]", site.port)), "timeout": 5.0, **rules}
        )
        wanted = {}
        for field, name in zip("abcdef", names, strict=False):
            wanted[read_remote(f"http://{host}:{site.port}/{name}", field, bounds)] = field
        return list(asyncio.run(MediaFetcher(bounds, resolve=resolve, public=public).fetch(wanted)).values())

    return get


def test_an_image_is_asked_for_plainly(site, fetch):
    site.answers["a.png"] = http(PNG, "Content-Type: image/png")
    assert fetch("a.png?x=1") == [PNG]
    first, *headers = site.heads[0].strip().split("\r\n")
    assert first == "GET /a.png?x=1 HTTP/1.1"
    assert {line.partition(":")[0] for line in headers} == {
        "Host",
        "User-Agent",
        "Accept",
        "Accept-Encoding",
        "Connection",
    }
    assert f"Host: example.com:{site.port}" in headers


@pytest.mark.parametrize(
    "answer",
    [
        http(PNG, length=False),
        http(CHUNKS, "Transfer-Encoding: chunked", length=False),
        http(PNG, "content-encoding: identity"),
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + http(PNG),
        b"HTTP/1.0 200 OK\r\n\r\n" + PNG,
        lambda peer: [(peer.sendall(bytes([byte])), time.sleep(0.001)) for byte in http(PNG)],
    ],
    ids=["until the end", "chunked", "identity", "interim answer", "HTTP/1.0", "byte by byte"],
)  # fmt: skip
def test_forms_of_an_answer(site, fetch, answer):
    site.answers["a"] = answer
    assert fetch("a") == [PNG]


def redirect(where, status="302 Found"):
    return http(b"", f"Location: {where}", status=status)


def trickle(peer):
    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
    for _ in range(100):
        peer.sendall(b"x")
        time.sleep(0.05)


def flood(head, piece):
    def send(peer):
        peer.sendall(head)
        while True:
            peer.sendall(piece)

    return send


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "its answer was cut off"),
        (http(PNG)[:-1], "its answer was cut off"),
        (http(b"5\r\nab", "Transfer-Encoding: chunked", length=False), "its answer was cut off"),
        (b"HTTP/1.1 200 OK\r\nContent-", "its answer was cut off"),
        (b"SSH-2.0-OpenSSH_9\r\n", "is no HTTP"),
        (b"\x16\x03\x01\x02\x00", "is no HTTP"),
        (http(b"zz\r\n", "Transfer-Encoding: chunked", length=False), "is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "is no HTTP"),
        (http(b"<html>", status="404 Not Found"), "it answered 404"),
        (http(b"", status="204 No Content"), "it answered 204"),
        (http(b"", status="302 Found"), "it answered 302"),
        (http(b"", status="304 Not Modified"), "it answered 304"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n", "no HTTP"),
        (http(PNG, "Content-Encoding: gzip"), "packed answer"),
        (http(b"", "Content-Length: 99999999999", length=False), "more than 1000 bytes"),
        (http(bytes(1001)), "more than 1000 bytes"),
        (flood(b"HTTP/1.1 200 OK\r\n\r\n", bytes(500)), "more than 1000 bytes"),
        (flood(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"), "more than 1000 bytes"),
        (flood(b"HTTP/1.1 200 OK\r\n", b"X: " + b"x" * 99 + b"\r\n"), "head of its answer is too long"),
        (flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "head of its answer is too long"),
        (lambda peer: time.sleep(3), "it took more than 0.5 s"),
        (trickle, "it took more than 0.5 s"),
        (redirect("http://169.254.169.254/latest/meta-data"), "leads to another URL"),
        (redirect("http://evil.test/", "301 Moved Permanently"), "leads to another URL"),
        (redirect("http://user@example.com/", "307 Temporary Redirect"), "leads to another URL"),
        (redirect("file:///etc/passwd", "308 Permanent Redirect"), "leads to another URL"),
        (redirect("a"), "led elsewhere more than 3 times"),
    ],
)  # fmt: skip
def test_every_other_answer_is_refused_by_name_and_in_time(site, fetch, answer, message):
    site.answers["a"] = answer
    begun = time.monotonic()
    with pytest.raises(RequestError, match=message) as caught:
        fetch("a", max_bytes=1000, timeout=0.5)
    assert time.monotonic() - begun < 3
    assert caught.value.param == "a" and caught.value.message.startswith("a ")
    assert "169.254" not in caught.value.message and "\n" not in caught.value.message


def test_redirects_within_the_list_are_followed(site, fetch):
    site.answers |= {"a": redirect("/b"), "b": redirect(f"http://example.com:{site.port}/c", "307 T"), "c": http(PNG)}
    assert fetch("a") == [PNG]


def test_an_address_that_is_not_public_is_never_connected_to(site):
    asked = []

    async def resolve(host, port):
        asked.append((host, port))
        return ["93.184.215.14", "127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    bounds = MediaRules((Domain("example.com", site.port),), timeout=5.0)
    fetcher = MediaFetcher(bounds, resolve=resolve)
    remote = read_remote(f"http://example.com:{site.port}/a", FIELD, bounds)
    for times in (1, 2):
        with pytest.raises(RequestError, match="has an address that is not public") as caught:
            asyncio.run(fetcher.fetch({remote: FIELD}))
        assert caught.value.param == FIELD
        assert asked == [("example.com", site.port)] * times
    assert site.heads == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0x7f000001", "2130706433", "127.1"]
)
def test_this_machine_is_not_public_under_any_name(site, host):
    bounds = MediaRules((Domain("*", site.port),), timeout=5.0)
    remote = read_remote(f"http://{host}:{site.port}/a", FIELD, bounds)
    with pytest.raises(RequestError, match=r"not public|cannot be found"):
        asyncio.run(MediaFetcher(bounds).fetch({remote: FIELD}))
    assert site.heads == []


def test_a_name_is_looked_up_once_and_the_address_that_was_checked_is_connected_to(site, fetch):
    """A name that leads elsewhere the second time it is looked up (DNS rebinding) gains nothing."""
    site.answers["a"] = http(PNG)
    seen = []

    async def resolve(host, port):
        seen.append("lookup")
        return ["127.0.0.1"] if len(seen) == 1 else ["192.0.2.1"]

    assert fetch("a", resolve=resolve, public=lambda address: seen.append(address) is None) == [PNG]
    assert seen == ["lookup", "127.0.0.1"]


def test_the_next_address_is_tried_where_one_does_not_answer(site, fetch):
    site.answers["a"] = http(PNG)

    async def two(host, port):
        return ["127.0.0.2", "127.0.0.1"]

    async def none(host, port):
        return ["127.0.0.2", "127.0.0.3"]

    async def unknown(host, port):
        raise OSError("no such host")

    assert fetch("a", resolve=two) == [PNG]
    for resolve, message in ((none, "the connection failed"), (unknown, "the host cannot be found")):
        with pytest.raises(RequestError, match=message):
            fetch("a", resolve=resolve)


def test_several_images_come_at_once_and_share_a_budget(site, fetch):
    def late(peer):
        site.wait(0.5)
        peer.sendall(http(PNG))

    site.answers |= {"a": late, "b": late, "c": late, "d": http(b"", status="404 No"), "e": http(b"", status="410 No")}
    begun = time.monotonic()
    assert fetch("a", "b", "c") == [PNG] * 3
    assert time.monotonic() - begun < 1.2
    with pytest.raises(RequestError, match="it answered 404") as caught:
        fetch("a", "d", "e")
    assert caught.value.param == "b"  # the field of the first that failed
    with pytest.raises(RequestError, match=f"more than {2 * len(PNG)} bytes"):
        fetch("a", "b", "c", max_total_bytes=2 * len(PNG))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=example.com",
         "-addext", "subjectAltName=DNS:example.com", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        capture_output=True, check=True,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize(
    ("host", "trusted", "clear"),
    [
        ("example.com", True, False),
        ("other.test", True, False),
        ("example.com", False, False),
        ("example.com", True, True),
    ],
)
def test_https_needs_a_certificate_of_the_name_that_was_asked_for(certificate, host, trusted, clear):
    site = Site(None if clear else tls_context(certificate / "cert.pem", certificate / "key.pem", None))
    site.answers["a"] = http(PNG)
    bounds = MediaRules((Domain("*", site.port),), timeout=5.0)
    wanted = {read_remote(f"https://{host}:{site.port}/a", FIELD, bounds): FIELD}
    tls = ssl.create_default_context(cafile=certificate / "cert.pem") if trusted else None
    fetcher = MediaFetcher(bounds, resolve=site.resolve, public=lambda _: True, tls=tls)
    try:
        if (host, trusted, clear) == ("example.com", True, False):
            assert list(asyncio.run(fetcher.fetch(wanted)).values()) == [PNG]
        else:
            with pytest.raises(RequestError, match=r"no secure connection came about|the connection failed"):
                asyncio.run(fetcher.fetch(wanted))
            assert [head for head in site.heads if head.startswith("GET")] == []
    finally:
        site.close()

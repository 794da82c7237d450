"""Who may use a server and how much: keys, their file, limits, CORS and TLS."""

import hashlib
import os
import ssl
import subprocess
import time

import httpx
import pytest

from k3hal.errors import InputError, UsageError
from k3hal.serve.http_errors import HttpError
from k3hal.serve.keys import KeyRing, Limits, read_keys
from k3hal.serve.limiter import Limiter
from k3hal.serve.server import tls_context

BODY = {"prompt": "x", "max_tokens": 5000}


def status(server, key, **options):
    with server.client(headers={"Authorization": f"Bearer {key}"}) as http:
        return http.post("/v1/completions", json=BODY, **options).status_code


@pytest.fixture
def key_file(tmp_path, monkeypatch):
    """A file of keys that is looked at on every request."""
    monkeypatch.setattr("k3hal.serve.keys._LOOK", 0.0)
    return tmp_path / "keys"


def write(file, text):
    """Change a file so that its time differs even on a coarse clock."""
    file.write_text(text)
    os.utime(file, ns=(time.time_ns(), time.time_ns()))


def test_a_file_of_keys_is_read_again_when_it_changes(running, plain, key_file, caplog):
    digest = hashlib.sha256(b"hashed").hexdigest()
    write(key_file, f"# who may ask\n\nplain name=alice\nsha256:{digest}\n")
    with running([plain("a")], api_keys=("given",), api_key_file=key_file) as server:
        assert [status(server, key) for key in ("plain", "hashed", "given")] == [200] * 3
        assert [status(server, key) for key in ("other", digest)] == [401] * 2
        write(key_file, "other\n")
        assert [status(server, key) for key in ("plain", "other", "given")] == [401, 200, 200]
        write(key_file, "secret-new rate=3\n")
        assert [status(server, key) for key in ("secret-new", "other")] == [401, 200]
        assert "the API keys stay as they are" in caplog.text
        key_file.unlink()
        assert status(server, "other") == 200
        write(key_file, "")
        assert [status(server, key) for key in ("other", "given")] == [401, 200]
    assert "secret-new" not in caplog.text


def test_a_file_without_keys_lets_nobody_in(running, plain, key_file):
    write(key_file, "")
    with running([plain("a")], api_key_file=key_file) as server, server.client() as http:
        assert http.post("/v1/completions", json=BODY).status_code == 401
        assert status(server, "x") == 401


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("key size=3", "line 1: after the key come"),
        ("\nkey requests_per_minute=0", "line 2: requests_per_minute must be a whole number of at least 1, got '0'"),
        ("key max_concurrent=many", "max_concurrent must be"),
        ("key two", "after the key come"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_wrong_file_of_keys_is_named_with_its_line_and_without_the_key(tmp_path, text, message):
    file = tmp_path / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message) as caught:
        KeyRing((), file, Limits())
    assert "key " not in str(caught.value).split(str(file))[1].replace("the key come", "")
    with pytest.raises(InputError, match="cannot read the API keys"):
        KeyRing((), tmp_path / "none", Limits())


def test_a_key_has_the_limits_of_its_line_or_else_of_the_server(tmp_path):
    file = tmp_path / "keys"
    file.write_text("a name=A\nb requests_per_minute=5\nc max_concurrent=2\n")
    keys = read_keys(file, Limits(10, 3))
    assert [(key.limits.requests_per_minute, key.limits.max_concurrent) for key in keys] == [(10, 3), (5, 3), (10, 2)]
    assert keys[0].name == "A"
    assert keys[1].name.startswith("key-")
    assert len({key.owner for key in keys}) == 3


def test_a_rate_is_a_bucket_that_fills_again():
    now = [0.0]
    limiter, limits = Limiter(clock=lambda: now[0]), Limits(requests_per_minute=60)
    for _ in range(60):
        limiter.enter("a", limits)
    with pytest.raises(HttpError) as caught:
        limiter.enter("a", limits)
    assert (caught.value.status, caught.value.code, caught.value.headers) == (429, "rate_limit", {"Retry-After": "1"})
    limiter.enter("b", limits)
    now[0] += 2.5
    limiter.enter("a", limits)
    limiter.enter("a", limits)
    with pytest.raises(HttpError):
        limiter.enter("a", limits)
    now[0] += 1000
    for _ in range(60):
        limiter.enter("a", limits)
    slow = Limits(requests_per_minute=1)
    limiter.enter("c", slow)
    with pytest.raises(HttpError) as caught:
        limiter.enter("c", slow)
    assert caught.value.headers == {"Retry-After": "60"}


def test_each_key_has_its_own_limits(running, plain, key_file):
    write(key_file, "few requests_per_minute=2\nmany\n")
    with running([plain("a")], api_key_file=key_file) as server, server.client() as http:
        assert [status(server, "few") for _ in range(3)] == [200, 200, 429]
        assert [status(server, "many") for _ in range(4)] == [200] * 4
        refused = http.post("/v1/messages", json={}, headers={"x-api-key": "few"})
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert http.get("/v1/models", headers={"x-api-key": "few"}).status_code == 200
        assert 'reason="rate_limit"} 2.0' in http.get("/metrics").text


def test_requests_at_a_time_are_limited_until_they_end(running, plain):
    one = {"prompt": "x", "max_tokens": 1}
    line = plain("x" * 5000, step_s=0.02)
    with running([line], limits=Limits(max_concurrent=1)) as server, server.client() as http:
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            events = response.iter_lines()
            next(events)
            refused = http.post("/v1/completions", json=one)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrency_limit")
        end = time.monotonic() + 5
        while http.post("/v1/completions", json=one).status_code == 429:
            assert time.monotonic() < end
        assert http.post("/v1/completions", json={}).status_code == 400
        assert http.post("/v1/completions", json=one).status_code == 200


def test_browsers_may_ask_from_the_origins_that_are_named(running, plain):
    ask = {"Origin": "https://app.test", "Access-Control-Request-Method": "POST"}
    with running([plain("a")], cors_origins=("https://app.test",), api_keys=("k",)) as server, server.client() as http:
        allowed = http.options("/v1/completions", headers=ask)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://app.test")
        assert http.options("/v1/completions", headers={**ask, "Origin": "https://evil.test"}).status_code == 400
        answer = http.post("/v1/completions", json=BODY, headers={"Origin": "https://app.test"})
        # An error can be read too.
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "https://app.test")
        assert "access-control-allow-origin" not in http.get("/health", headers={"Origin": "https://evil.test"}).headers
    with running([plain("a")]) as server, server.client() as http:
        assert "access-control-allow-origin" not in http.get("/health", headers={"Origin": "https://app.test"}).headers


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        capture_output=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return folder


def test_https(running, plain, certificate):
    context = tls_context(certificate / "cert.pem", certificate / "key.pem", None)
    with running([plain("ab")], tls=context) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=certificate / "cert.pem")
        with httpx.Client(base_url=server.url, verify=trusting) as http:
            assert http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == "ab"
        with httpx.Client() as http, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            http.get(f"{server.url}/health")


def test_clients_can_be_asked_for_certificates(running, plain, certificate):
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    with running([plain("a")], tls=tls_context(cert, key, cert)) as server:
        trusting = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=server.url, verify=trusting) as http, pytest.raises(httpx.HTTPError):
            http.get("/health")
        trusting.load_cert_chain(cert, key)
        with httpx.Client(base_url=server.url, verify=trusting) as http:
            assert http.get("/health").status_code == 200


def test_tls_files_that_are_wrong_are_named(certificate, tmp_path):
    (tmp_path / "bad.pem").write_text("no certificate")
    bad, cert, key = tmp_path / "bad.pem", certificate / "cert.pem", certificate / "key.pem"
    for files in ((tmp_path / "none.pem", None, None), (bad, None, None), (cert, None, None), (cert, key, bad)):
        with pytest.raises(UsageError, match=r"TLS cannot be set up with .*\.pem"):
            tls_context(*files)

"""Where images may come from: addresses of the public internet, hosts of the allow-list, and URLs read in one way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.errors import RequestError
from k3hal.serve.media.addresses import is_public
from k3hal.serve.media.rules import Domain, MediaRules
from k3hal.serve.media.urls import read_remote, redirected

EXAMPLE = MediaRules((Domain("example.com"),))
ANY = MediaRules((Domain("*"),))


@pytest.mark.parametrize(
    "address", ["93.184.215.14", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1",
        "100.100.100.200", "169.254.169.254", "168.63.129.16", "192.0.0.192", "192.0.2.1", "198.18.0.1", "224.0.0.1",
        "239.255.255.250", "240.0.0.1", "203.0.113.9", "3fff::1", "255.255.255.255",
        "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "fec0::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:a00:1", "::127.0.0.1", "::7f00:1",
        "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2001:0:7f00:1::1", "100::1",
        "", "localhost", "127.1", "0x7f000001", "2130706433", "8.8.8.8 ", "1.1.1",
    ],
)  # fmt: skip
def test_every_other_address_is_refused(address):
    assert not is_public(address)


@settings(max_examples=300, deadline=None)
@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_judged_alike_in_every_form(address):
    assert is_public(str(address)) == is_public(f"::ffff:{address}") == is_public(f"64:ff9b::{address}")


@pytest.mark.parametrize(
    ("entry", "good", "bad"),
    [
        ("example.com", ["https://example.com/a", "http://EXAMPLE.com./a"], ["https://a.example.com/", "https://xexample.com/"]),
        ("Example.COM", ["https://example.com/"], ["https://example.com.evil.test/", "https://example.com:8443/"]),
        ("*.example.com", ["https://a.example.com/", "https://a.b.example.com/"], ["https://example.com/", "https://xexample.com/"]),
        ("example.com:8443", ["https://example.com:8443/", "http://example.com:8443/"], ["https://example.com/"]),
        ("*", ["https://a.test/", "http://b/", "https://[2606:4700::1111]/"], ["https://a.test:22/", "http://a.test:443/"]),
        ("*:81", ["http://a.test:81/"], ["http://a.test/"]),
        ("[2606:4700::1111]:81", ["http://[2606:4700::1111]:81/"], ["http://[2606:4700::1112]:81/"]),
    ],
)  # fmt: skip
def test_what_an_entry_of_the_list_lets_in(entry, good, bad):
    rules = MediaRules((Domain.parse(entry),))
    for url in good:
        read_remote(url, "here", rules)
    for url in bad:
        with pytest.raises(RequestError, match="not among the allowed media domains"):
            read_remote(url, "here", rules)


@pytest.mark.parametrize(
    "entry", ["", " ", "https://example.com", "example.com/a", "a.*.com", "example.com:", "example.com:0", "a:70000",
              "a:b", "*example.com", "**", "a b", "user@a", ".example.com", "::1", "bücher.example"]
)  # fmt: skip
def test_a_list_with_anything_else_is_refused(entry):
    with pytest.raises(ValueError, match="is not HOST or HOST:PORT"):
        Domain.parse(entry)


@pytest.mark.parametrize(
    ("url", "host", "port", "target"),
    [
        ("https://example.com", "example.com", 443, "/"),
        ("HTTP://Example.COM:80", "example.com", 80, "/"),
        ("https://example.com./a/b.png?x=1&y=%20#part", "example.com", 443, "/a/b.png?x=1&y=%20"),
        ("https://example.com?x", "example.com", 443, "/?x"),
        ("https://example.com/é?ü", "example.com", 443, "/%C3%A9?%C3%BC"),
        ("https://bücher.example/", "xn--bcher-kva.example", 443, "/"),
    ],
)
def test_a_url_is_read_once(url, host, port, target):
    remote = read_remote(url, "here", ANY)
    assert (remote.host, remote.port, remote.target) == (host, port, target)
    assert read_remote(str(remote), "here", ANY) == remote


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "must be a data:"),
        ("x", "must be a data:"),
        ("//example.com/a.png", "must be a data:"),
        ("file:///etc/passwd", "must be a data:"),
        ("ftp://example.com/", "must be a data:"),
        ("gopher://example.com/", "must be a data:"),
        (" https://example.com/", "must be a data:"),
        ("https:", "not a URL that can be fetched"),
        ("https:///a.png", "not a URL that can be fetched"),
        ("https://user@example.com/", "not a URL that can be fetched"),
        ("https://user:secret@example.com/", "not a URL that can be fetched"),
        ("https://@example.com/", "not a URL that can be fetched"),
        ("https://example.com\\@evil.test/", "not a URL that can be fetched"),
        ("https://example.com\t.evil.test/", "not a URL that can be fetched"),
        ("https://example.com/a\r\nHost: evil.test", "not a URL that can be fetched"),
        ("https://example.com/a b", "not a URL that can be fetched"),
        ("https://exam%70le.com/", "not a URL that can be fetched"),
        ("https://[::1", "not a URL that can be fetched"),
        ("https://[fe80::1%25eth0]/", "not a URL that can be fetched"),
        ("https://example.com:/", "not a URL that can be fetched"),
        ("https://example.com:0/", "not a URL that can be fetched"),
        ("https://example.com:99999/", "not a URL that can be fetched"),
        ("https://example.com:x/", "not a URL that can be fetched"),
        ("https://" + "a" * 64 + ".com/", "not a URL that can be fetched"),
        ("https://example..com/", "not a URL that can be fetched"),
        ("https://example.com/" + "a" * 9000, "not a URL that can be fetched"),
    ],
)
def test_what_is_no_such_url_is_refused_by_name(url, message):
    with pytest.raises(RequestError, match=message) as caught:
        read_remote(url, "messages[0].content[1].image_url", ANY)
    assert caught.value.param == "messages[0].content[1].image_url"
    assert "secret" not in caught.value.message
    assert len(caught.value.message) < 300 and "\n" not in caught.value.message


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["http://", "https://", "HTTPS://example.com", "https://example.com:"]), st.text(max_size=30))
def test_whatever_is_let_in_is_of_the_list_and_fits_a_request_line(start, rest):
    try:
        remote = read_remote(start + rest, "here", EXAMPLE)
    except RequestError:
        return
    assert (remote.host, remote.port) == ("example.com", {"http": 80, "https": 443}[remote.scheme])
    assert remote.target.isascii() and remote.target.isprintable() and " " not in remote.target


@pytest.mark.parametrize(
    "location", ["/b", "b", "?b", "//example.com/b", "https://example.com/b", "HTTPS://EXAMPLE.com/b"]
)
def test_redirects_that_stay_are_followed(location):
    assert (
        redirected(read_remote("https://example.com/a", "here", EXAMPLE), location, "here", EXAMPLE).host
        == "example.com"
    )


@pytest.mark.parametrize(
    "location", ["http://169.254.169.254/latest", "https://evil.test/", "file:///etc/passwd", "//evil.test", "data:,",
                 "https://u@example.com/", "https://example.com:22/", "http://example.com/", "http://[::1"]
)  # fmt: skip
def test_redirects_that_leave_are_not(location):
    with pytest.raises(RequestError, match="here leads ") as caught:
        redirected(read_remote("https://example.com/a", "here", EXAMPLE), location, "here", EXAMPLE)
    assert "169.254" not in caught.value.message and "evil" not in caught.value.message

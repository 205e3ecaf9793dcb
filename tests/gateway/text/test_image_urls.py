"""The addresses of images that the gateway fetches."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.edge.config import Config, Limits
from gateway.edge.errors import ApiError
from gateway.text import image_urls
from gateway.text.image_urls import is_public, load_images
from tests.gateway.text.test_row_fields import PNG, url
from tests.support.http_servers import Script, script

INNER = (
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200"),
    *("0.0.0.0", "255.255.255.255", "224.0.0.1", "240.0.0.1", "192.0.0.192", "198.18.0.1", "168.63.129.16"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:127.0.0.1"),
    *("::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::1", "2001::1"),
)


def test_inner_addresses_are_not_public():
    assert [address for address in INNER if is_public(address)] == []
    assert all(map(is_public, ("8.8.8.8", "93.184.216.34", "2606:4700::1111")))


@pytest.fixture(scope="module")
def site() -> Iterator[Script]:
    answers = {
        "/a.png": (200, {}, PNG),
        "/a%20b.png?c=d": (200, {}, PNG),
        "/text": (200, {}, b"<html>"),
        "/large": (200, {}, PNG + bytes(2000)),
        "/moved": (302, {"location": "/a.png"}, b""),
        "/circle": (302, {"location": "/circle"}, b""),
        "/inwards": (302, {"location": "http://169.254.169.254/latest/meta-data"}, b""),
        "/local": (307, {"location": "file:///etc/passwd"}, b""),
    }
    with script(answers) as site:
        yield site


@pytest.fixture
def local_is_public(monkeypatch):
    monkeypatch.setattr(image_urls, "is_public", lambda address: address == "127.0.0.1" or is_public(address))


def fetched(*addresses: str, image_urls: bool = True) -> list[bytes]:
    config = Config(image_urls=image_urls, limits=Limits(body=1000))
    return asyncio.run(load_images(config, [(f"messages[0].content[{i}]", url) for i, url in enumerate(addresses)]))


@pytest.mark.usefixtures("local_is_public")
def test_public_images_are_fetched_through_redirects(site):
    assert fetched(f"{site.url}/a.png", url("PNG"), f"{site.url}/moved", f"{site.url}/a b.png?c=d") == [PNG] * 4


@pytest.mark.usefixtures("local_is_public")
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/text", "is no JPEG, PNG or WebP file"),
        ("/large", "larger than GATEWAY_BODY"),
        ("/missing", "the server answers 404"),
        ("/circle", "redirects more than 3 times"),
        ("/inwards", "cannot be fetched"),
        ("/local", "cannot be fetched"),
    ],
)
def test_other_answer_is_refused_by_its_place(site, path, reason):
    with pytest.raises(ApiError) as error:
        fetched(url("PNG"), site.url + path)
    assert error.value.param == "messages[0].content[1]"
    assert reason in error.value.message
    assert error.value.status == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0x7f000001", "2130706433", "127.1", "user@127.0.0.1"])
def test_inner_server_sees_no_request(site, host):
    site.received.clear()
    with pytest.raises(ApiError, match="cannot be fetched"):
        fetched(f"{site.url.replace('127.0.0.1', host)}/a.png")
    assert site.received == []


def test_address_that_was_checked_is_the_one_that_is_connected(site, monkeypatch):
    """A name that resolves to a public address first and to an inner one later reaches nothing inside."""
    site.received.clear()
    port = int(site.url.rpartition(":")[2])
    answers = iter(["192.0.2.7", "127.0.0.1"])
    resolve = asyncio.BaseEventLoop.getaddrinfo
    connected = []

    async def rebinding(loop: Any, host: Any, *rest: Any, **options: Any) -> Any:
        if host == "rebinding.example":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]
        connected.append(host)
        return await resolve(loop, host, *rest, **options)

    async def refuse(address: str, *_: Any, **__: Any) -> Any:
        connected.append(address)
        raise OSError

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", rebinding)
    monkeypatch.setattr(asyncio, "open_connection", refuse)
    monkeypatch.setattr(image_urls, "is_public", lambda address: address == "192.0.2.7")
    with pytest.raises(ApiError, match="cannot be fetched"):
        fetched(f"http://rebinding.example:{port}/a.png")
    assert connected == ["192.0.2.7"]
    assert site.received == []


def test_addresses_of_one_request_are_bounded(site):
    with pytest.raises(ApiError, match="at most 16 are possible"):
        fetched(*[f"{site.url}/a.png"] * 17)


def test_addresses_need_the_setting():
    with pytest.raises(ApiError, match=r"the gateway fetches none: .* or set IMAGE_URLS=1 on the server"):
        fetched("https://example.org/a.png", image_urls=False)

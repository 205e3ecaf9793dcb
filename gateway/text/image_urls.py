"""Read the images of chats: from data URLs and, with IMAGE_URLS=1, from public servers.

A client chooses the address, so the gateway must not let it reach what only this network reaches. It resolves a name
once and connects to the very address that it checked: a name that resolves otherwise a moment later changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

import h11

from gateway.edge.config import Config
from gateway.edge.errors import ApiError
from gateway.text.row_fields import FORMATS, NAMES, read_image
from gateway.triton.rows import together
from gateway.triton.served import System
from triton_transformers.tensors import Tensor

IMAGES = "images"  # the input of systems that read images in a chat
# The place of an image in a request, for messages, and its URL.
Image = tuple[str, str]
ADDRESSES = ("http://", "https://")
FETCH_S = 10.0  # for all redirects and the file
MAX_ADDRESSES = 16  # in one request
MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
UNQUOTED = "%/:=&?~+!$,;@'()*"  # in the path and the query of an address
# Networks that Python's ipaddress takes for public ones. Oracle Cloud and Azure tell machines about themselves in the
# first two, and the others are other forms of inner addresses.
INNER = [*map(ipaddress.ip_network, ("192.0.0.0/24", "168.63.129.16/32", "fec0::/10", "2002::/16"))]


async def image_tensors(config: Config, system: System, images: Sequence[Image]) -> list[Tensor]:
    """Return the system's input with a request's images; none if it has none. Raise ApiError for one that is wrong."""
    if not images:
        return []
    if IMAGES not in system.inputs:
        raise ApiError(400, "This model takes texts, not images.", images[0][0], "unsupported_value")
    return [Tensor.from_texts(IMAGES, await load_images(config, images))]


async def load_images(config: Config, images: Sequence[Image]) -> list[bytes]:
    """Return the files of a request's images."""
    if len(images) > (most := config.limits.texts):
        message = f"The request has {len(images)} images; at most {most} are possible (GATEWAY_TEXTS)."
        raise ApiError(400, message, images[most][0], "too_many_inputs")
    addresses = [where for where, url in images if config.image_urls and url.lower().startswith(ADDRESSES)]
    if len(addresses) > MAX_ADDRESSES:
        message = f"The request has the addresses of {len(addresses)} images; at most {MAX_ADDRESSES} are possible."
        raise ApiError(400, message, addresses[MAX_ADDRESSES], "too_many_inputs")
    quota = Quota(config.limits.body)

    async def load(where: str, url: str) -> bytes:
        if where in addresses:
            return await fetch(where, url, quota)
        is_address = url.lower().startswith(ADDRESSES)
        return read_image(url, where, remedy=", or set IMAGE_URLS=1 on the server" if is_address else "")

    return await together(load(where, url) for where, url in images)


class Quota:
    """The bytes that the images of one request may still have."""

    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise Refused("makes the images of the request larger than GATEWAY_BODY")


class Refused(Exception):
    """Raised with the end of the sentence that the client gets."""


async def fetch(where: str, url: str, quota: Quota) -> bytes:
    """Return the file at an address. The errors of all that cannot be reached are alike: they must not map a network.

    Raise ApiError that names the place in the request.
    """
    try:
        async with asyncio.timeout(FETCH_S):
            for _ in range(1 + MAX_REDIRECTS):
                answer = await get(url, quota)
                if isinstance(answer, bytes):
                    break
                url = urljoin(url, answer)
            else:
                raise Refused(f"redirects more than {MAX_REDIRECTS} times")
        if not answer.startswith(tuple(FORMATS.values())):
            raise Refused(f"is no {NAMES} file")
        return answer
    except TimeoutError:
        reason = f"did not arrive within {FETCH_S:g} seconds"
    except Refused as error:
        reason = str(error)
    except (OSError, ValueError, h11.ProtocolError):
        reason = "cannot be fetched: the address must be that of a public server which answers with the image"
    raise ApiError(400, f"'{where}' {reason}.", where, "invalid_value")


async def get(url: str, quota: Quota) -> bytes | str:
    """Return the file at an address, or the address to which the server redirects."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError(url)
    host = parts.hostname.encode("idna").decode()
    reader, writer = await connect(host, parts.port, parts.scheme == "https")
    try:
        target = quote(urlunsplit(("", "", parts.path or "/", parts.query, "")), safe=UNQUOTED)
        headers = [("Host", parts.netloc.encode("idna").decode()), ("Accept", "image/*"), ("Connection", "close")]
        connection = h11.Connection(h11.CLIENT)
        writer.write(connection.send(h11.Request(method="GET", target=target, headers=headers)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        file = bytearray()
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(2**16))
            elif isinstance(event, h11.Response):
                location = dict(event.headers).get(b"location")
                if event.status_code in REDIRECTS and location:
                    return location.decode()
                if event.status_code != 200:
                    raise Refused(f"is not there: the server answers {event.status_code}")
            elif isinstance(event, h11.Data):
                quota.take(len(event.data))
                file += event.data
        return bytes(file)
    finally:
        writer.close()


async def connect(host: str, port: int | None, secure: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the host. Raise OSError unless an address of it is public and answers."""
    port = port or (443 if secure else 80)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for address in [str(entry[4][0]) for entry in found]:
        if is_public(address):
            try:
                return await asyncio.open_connection(
                    address, port, ssl=secure or None, server_hostname=host if secure else None
                )
            except OSError:
                continue
    raise OSError(f"no address of {host} can be reached")


def is_public(text: str) -> bool:
    """Return whether this is the address of one machine on the internet."""
    address = ipaddress.ip_address(text.partition("%")[0])
    is_special = address.is_multicast or address.is_reserved or any(address in network for network in INNER)
    return address.is_global and not is_special

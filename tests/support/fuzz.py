"""Bad requests for every public input, made from the configurations of the models and a seed.

A request begins as a good one. Each of its parts is replaced by a bad one with a small probability, so that most
requests are wrong in one or two places and reach the code behind the first check. A plain `Random` makes a request in
less than a millisecond; Hypothesis would need four.
"""

from __future__ import annotations

import copy
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from triton_transformers.tensors import DTYPES

KEY = "a-key-for-the-fuzzer"
SHOWN = 600  # bytes of a request in a report
# Replaced by arrays in arrays when the JSON is written: json.dumps cannot write them.
DEEP = "a deeply nested value"
HUGE = "long " * 25_000
TEXTS = ["Which battery fits?", "a", "비 그친 뒤 골목에"]
BAD_TEXTS = [
    *(b"", b"\0", b" ", b"\xff\xfe", b"\xed\xa0\x80", b"\xf0\x9f", b"a\0b", HUGE.encode(), b"[MASK] [PAD] [SEP]"),
    *(b"\xff\x00\x00\x00", b"\xff\xff\xff\xff\xff", b"\xff\x05\x00\x00\x00"),
    *("\u202e\u0301\ufeff\U0001f469\u200d\U0001f467".encode(), b"{{ 7 * 7 }}", b"%s%n", b"\\u0000", b"\r\n\r\n"),
]
NAMES = ["", "nothing", "..", "../..", "a" * 5000, "\0", "é", "embedding/../tokenizer", "%2e%2e", "a b", "*"]
NUMBERS = [0, -1, 1, 2, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30, 1.5, 1e300]
BATCHES = [[], [0], [0, 1], [1], [2], [1, 1], [1, 1, 1], [-1, 1], [1, -1], [65, 1], [1, 0], [1] * 100, [3, 7]]
SHAPES = [*BATCHES, [2**31, 1], [2**32, 2**32], [2**62, 4], [2**63 - 1, 1]]
VALUES = ["", None, True, {}, [], [[]], [None], {"a": 1}, DEEP, HUGE, math.nan, math.inf, "\ud800", *NUMBERS, *NAMES]
# Numbers that a shape in JSON may claim: 8 MB.
LARGEST_CLAIM = 2**20
NUMERIC = sorted(set(DTYPES) - {"BYTES"})
CHARACTERS = [range(0x80), range(0x800), range(0xD800), range(0xE000, 0x110000)]
METHODS = ["GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "X", "PRI"]
CONTENT_TYPES = ["text/plain", "", "application/octet-stream", "multipart/form-data; boundary=x", "\xff"]
# Lines that every server can live with, and lines after which it may end the connection.
ODD_LINES = [
    *("Connection: close", "Connection: Upgrade", "Expect: 100-continue", "Accept-Encoding: gzip", "Accept: image/png"),
    *("Accept-Encoding: nonsense", "Authorization: Basic %%%", "Authorization: Bearer \xff", "Host: evil.example"),
    *("Origin: null", "X-Request-Id: \xff", "triton-admin-key: guess", "traceparent: 00-0-0-0"),
]
BROKEN_LINES = [
    *("Transfer-Encoding: nonsense", "Content-Length: 1, 2", "Content-Length: -1", "Content-Length : 3", "no colon"),
    *("Upgrade: h2c", "Expect: x", "X-Control: a\0b", "X\xff: \xfe"),
    *(f"Content-Length: {'9' * 30}", f"X-Long: {'x' * 100_000}"),
]


@dataclass(frozen=True, repr=False)
class Request:
    """Bytes for a port, or a message for a method of gRPC."""

    to: str  # the setting of the port
    data: bytes
    method: str = ""  # of HTTP, or the full name of a method of gRPC
    framed: bool = True  # whether the server can know where it ends; it need not answer any other
    leaves: bool = False  # whether the client leaves without waiting for the response

    def __repr__(self) -> str:
        flags = f"{'' if self.framed else ', not framed'}{', leaves' if self.leaves else ''}"
        return f"<{self.to} {self.method[:200]}{flags}, {len(self.data)} bytes: {self.data[:SHOWN]!r}>"


def one_in(rng: Random, count: int) -> bool:
    return rng.randrange(count) == 0


def seldom(rng: Random, good: Any, bad: list[Any]) -> Any:
    """Return one of the bad values in one of ten cases."""
    return rng.choice(bad) if one_in(rng, 10) else good


def junk(rng: Random) -> Any:
    """Return a value for any place of JSON."""
    if one_in(rng, 2):
        return copy.deepcopy(rng.choice(VALUES))
    return "".join(chr(rng.choice(rng.choice(CHARACTERS))) for _ in range(rng.randint(0, 8)))


def noise(rng: Random, size: int) -> bytes:
    """Return up to this many random bytes."""
    return rng.randbytes(rng.randint(0, size))


# --- tensors --------------------------------------------------------------------------------------------------------


def tensors(rng: Random, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the inputs of a request to a model with this configuration. Their `data` has bytes or numbers."""
    rows, length = rng.randint(1, 3), rng.randint(1, 4)
    batch = [rows] if config["max_batch_size"] else []
    drawn = []
    for spec in config["input"]:
        if spec.get("optional") and one_in(rng, 2):
            continue
        shape = [*batch, *(length if int(size) < 0 else int(size) for size in spec["dims"])]
        datatype = spec["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
        good = [text.encode() for text in TEXTS] if datatype == "BYTES" else [0, 1, 2]
        values = seldom(rng, good, [BAD_TEXTS if datatype == "BYTES" else NUMBERS])
        count = seldom(rng, math.prod(shape), [0, 1, 2, 65, 300])
        few = rng.choices(values, k=rng.randint(1, 3))
        drawn.append(
            {
                "name": seldom(rng, spec["name"], NAMES),
                "shape": seldom(rng, shape, SHAPES),
                "datatype": seldom(rng, datatype, [*DTYPES, "BYTES", "BF16", "STRING", "", "bytes", "FP8"]),
                "data": (few * count)[:count],
            }
        )
    return seldom(rng, drawn, [[], drawn * 2, drawn[1:], drawn[::-1]])


def raw(rng: Random, tensor: dict[str, Any]) -> bytes:
    """Return the tensor's data in Triton's binary format, or bytes that lie about their length."""
    if any(isinstance(value, bytes) for value in tensor["data"]):
        lies = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
        lengths = [seldom(rng, len(value), lies) if n < 3 else len(value) for n, value in enumerate(tensor["data"])]
        data = b"".join(n.to_bytes(4, "little") + value for n, value in zip(lengths, tensor["data"], strict=True))
    else:
        data = np.array([int(value) % 127 for value in tensor["data"]], DTYPES.get(tensor["datatype"], "u1")).tobytes()
    return damaged(rng, data) if one_in(rng, 10) else data


# --- JSON and bytes -------------------------------------------------------------------------------------------------


class Twin(str):
    """A key that an object of JSON can have twice."""

    __slots__ = ()
    __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]


def mutated(rng: Random, tree: Any) -> Any:
    """Return JSON of which up to two parts are replaced, removed, renamed or repeated."""
    root = [copy.deepcopy(tree)]
    for _ in range(rng.choice([0, 1, 1, 2])):
        places = list(parts(root))
        place, key = places[rng.randint(0, len(places) - 1)]
        action = rng.choice(["replace", "remove", "add", "wrap"])
        if action == "remove" and place is not root:
            del place[key]
        elif action == "wrap":
            place[key] = [place[key]]
        elif action == "add" and isinstance(place, dict):
            place[rng.choice([Twin(key), *NAMES])] = junk(rng)
        elif action == "add" and place is not root:
            place.append(junk(rng))
        else:
            place[key] = junk(rng)
    return root[0]


def parts(place: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(place.items() if isinstance(place, dict) else enumerate(place[:8])):
        yield place, key
        if isinstance(value, dict | list):
            yield from parts(value)


def json_bytes(rng: Random, tree: Any, depth: int) -> bytes:
    """Mutate JSON and write it. Bytes that are not UTF-8 become what they are, or escapes of half a character."""
    text = json.dumps(
        without_crash(mutated(rng, tree)),
        ensure_ascii=one_in(rng, 2),
        default=lambda data: data.decode(errors="surrogateescape"),
    )
    data = text.encode(errors="surrogatepass" if "\ud800" in text else "surrogateescape")
    data = data.replace(json.dumps(DEEP).encode(), b"[" * depth + b"]" * depth)
    if one_in(rng, 20):
        return damaged(rng, data)
    return rng.choice([b"", b"[" * depth, b'{"a":' * depth, b"\x1f\x8b"]) if one_in(rng, 20) else data


def without_crash(tree: Any) -> Any:
    """Replace shapes that crash Triton: TRITON-FAULTS.md#bad-requests."""
    inputs = tree.get("inputs") if isinstance(tree, dict) else None
    for tensor in inputs if isinstance(inputs, list) else []:
        shape = tensor.get("shape") if isinstance(tensor, dict) and tensor.get("datatype") in NUMERIC else None
        if isinstance(shape, list) and shape and all(type(size) is int and 0 <= size < 2**64 for size in shape):
            claimed = math.prod(shape)
            if claimed > LARGEST_CLAIM and claimed % 2**64:  # Triton computes with 64 bits
                tensor["shape"] = [LARGEST_CLAIM]
    return tree


def damaged(rng: Random, data: bytes) -> bytes:
    """Replace a part of the bytes."""
    start = rng.randint(0, len(data))
    end = rng.choice([start, start + 1, start + 4, len(data)])
    patches = [b"", b"\0", b"\xff\xfe", b'"', b"{", b"1" * 400, b"\xff" * 8, b"\x80" * 12]
    return data[:start] + (rng.choice(patches) if one_in(rng, 2) else noise(rng, 8)) + data[end:]


# --- HTTP -----------------------------------------------------------------------------------------------------------


def http(rng: Random, to: str, method: str, path: str, body: bytes, header: str = "") -> Request:
    """Put a body on the wire, with lies in the head. `header` is a line of it."""
    if one_in(rng, 40):
        data = noise(rng, 64) if one_in(rng, 2) else damaged(rng, b"GET / HTTP/1.1\r\n\r\n")
        return Request(to, data, "GET", framed=False)
    segments = path.split("/")
    position = rng.randint(1, len(segments) - 1)
    odd = ["", "..", "%2e%2e", "%00", "%ff", "%", "7", "-1", "x" * 5000, "..%2f..%2fetc", "?a=%ff", "é"]
    segments[position] = seldom(rng, segments[position], odd)
    method = seldom(rng, method, METHODS)
    length, body, whole = framing(rng, body)
    lines = [f"{method} {'/'.join(segments)} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {KEY}", header]
    lines += [length, f"Content-Type: {seldom(rng, 'application/json', CONTENT_TYPES)}"]
    lines.append(seldom(rng, "", ODD_LINES))
    broken = seldom(rng, "", BROKEN_LINES)
    head = "\r\n".join(filter(None, [*lines, broken])) + "\r\n\r\n"
    framed = whole and not broken and method.isupper() and method not in ("CONNECT", "PRI", "X")
    # Some longer paths get no answer: TRITON-FAULTS.md#bad-requests.
    framed = framed and (to == "GATEWAY_PORT" or len(lines[0]) < 4096)
    return Request(to, head.encode("latin-1") + body, method, framed, leaves=one_in(rng, 20))


def framing(rng: Random, body: bytes) -> tuple[str, bytes, bool]:
    """Return the line of the head that states where the body ends, the body as it is sent, and whether they agree."""
    kind = rng.choice(["right"] * 12 + ["short", "long", "none", "chunks", "chunks", "wrong chunks"])
    if "chunks" in kind:
        size = rng.randint(1, 2000) + len(body) // 1000  # the gateway limits the bytes between chunks
        chunks = [body[start : start + size] for start in range(0, len(body), size)]
        data = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
        return "Transfer-Encoding: chunked", damaged(rng, data) if kind == "wrong chunks" else data, kind == "chunks"
    if one_in(rng, 20):
        name, compress = rng.choice([("gzip", gzip.compress), ("deflate", zlib.compress), ("gzip", bytes)])
        data = compress(body)
        return f"Content-Encoding: {name}\r\nContent-Length: {len(data)}", data, True
    lie = {"short": len(body) // 2, "long": len(body) + rng.choice([1, 1000, 2**40])}.get(kind, len(body))
    return "" if kind == "none" else f"Content-Length: {lie}", body, kind == "right"


def triton_http(rng: Random, configs: dict[str, Any], depth: int) -> Request:
    """Return a request to any endpoint of Triton's HTTP server, or for its metrics."""
    config = configs[rng.choice(sorted(configs))]
    path = f"/v2/models/{config['name']}" + seldom(rng, "", ["/versions/1"])
    kind = rng.choice(["json", "binary", "generate", "other"])
    if kind == "other":
        path, tree = rng.choice(endpoints(config["name"]))
        to = "TRITON_METRICS_PORT" if path == "/metrics" else "TRITON_HTTP_PORT"
        return http(rng, to, "POST", path, json_bytes(rng, tree, depth)) if tree else http(rng, to, "GET", path, b"")
    inputs = tensors(rng, config)
    if kind == "generate":
        tree = {tensor["name"]: tensor["data"][0] if len(tensor["data"]) == 1 else tensor["data"] for tensor in inputs}
        path += rng.choice(["/generate", "/generate_stream"])
        return http(rng, "TRITON_HTTP_PORT", "POST", path, json_bytes(rng, tree, depth))
    tree = {"inputs": inputs, "outputs": [{"name": output["name"]} for output in config["output"] if one_in(rng, 2)]}
    if kind == "json":
        return http(rng, "TRITON_HTTP_PORT", "POST", f"{path}/infer", json_bytes(rng, tree, depth))
    data = [raw(rng, tensor) for tensor in inputs]
    for tensor, part in zip(inputs, data, strict=True):
        tensor["parameters"] = {"binary_data_size": seldom(rng, len(part), NUMBERS)}
        tensor.pop("data", None)
    head = json_bytes(rng, tree | {"parameters": {"binary_data_output": one_in(rng, 2)}}, depth)
    lies = ["", "abc", 0, -1, len(head) - 1, len(head) + 1, 10**6, 2**31, 2**63, 2**64]
    header = f"Inference-Header-Content-Length: {seldom(rng, len(head), lies)}"
    return http(rng, "TRITON_HTTP_PORT", "POST", f"{path}/infer", head + b"".join(data), header)


def endpoints(model: str) -> list[tuple[str, Any]]:
    """Return the other endpoints, each with a good body, or None for a GET."""
    own, repository = f"/v2/models/{model}", f"/v2/repository/models/{model}"
    return [
        *((f"{own}{end}", None) for end in ("", "/config", "/stats", "/ready", "/versions/1", "/trace/setting")),
        *((f"/v2{end}", None) for end in ("", "/health/live", "/health/ready", "/models/stats", "/logging")),
        *((path, None) for path in ("/metrics", "/", "/v2/trace/setting", "/v2/systemsharedmemory/status")),
        ("/v2/repository/index", {"ready": True}),
        (f"{repository}/load", {"parameters": {"config": "{}"}}),
        (f"{repository}/unload", {"parameters": {"unload_dependents": True}}),
        ("/v2/systemsharedmemory/region/r/register", {"key": "/region", "offset": 0, "byte_size": 64}),
        ("/v2/cudasharedmemory/region/r/register", {"raw_handle": {"b64": "AAAA"}, "byte_size": 64}),
        ("/v2/logging", {"log_verbose_level": 1, "log_file": "log"}),
        (f"{own}/trace/setting", {"trace_level": ["TIMESTAMPS"], "trace_file": "trace"}),
    ]


def gateway_http(rng: Random, bodies: list[tuple[str, Any]], depth: int) -> Request:
    """Return a request to a route of the gateway. `bodies` has paths, each with a good body, or None for a GET."""
    path, tree = rng.choice(bodies)
    if tree is None:
        return http(rng, "GATEWAY_PORT", "GET", path, b"")
    body = json_bytes(rng, with_text(tree, seldom(rng, None, BAD_TEXTS)), depth)
    return http(rng, "GATEWAY_PORT", "POST", path, body)


def with_text(tree: Any, text: bytes | None) -> Any:
    """Replace the texts of a good body by another one."""
    if isinstance(tree, dict):
        return {key: value if key in ("model", "role") else with_text(value, text) for key, value in tree.items()}
    if isinstance(tree, list):
        return [with_text(value, text) for value in tree]
    return text if isinstance(tree, str) and text is not None else tree


# --- gRPC -----------------------------------------------------------------------------------------------------------

SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
CONTENTS = [field.name for field in service_pb2.InferTensorContents.DESCRIPTOR.fields]
PARAMETERS = ["sequence_id", "sequence_end", "priority", "timeout", "triton_enable_empty_final_response", "unknown"]


def triton_grpc(rng: Random, configs: dict[str, Any]) -> Request:
    """Return a message to any method of Triton's gRPC server."""
    config = configs[rng.choice(sorted(configs))]
    name = rng.choice(["ModelInfer", "ModelInfer", "ModelStreamInfer", "other"])
    if name == "other":
        method = rng.choice([method for method in SERVICE.methods if "Infer" not in method.name])
        name, message = method.name, any_message(rng, method.input_type._concrete_class(), config["name"])
    else:
        message = infer_message(rng, config)
    data = message.SerializeToString()
    if one_in(rng, 10):
        data = damaged(rng, data) if one_in(rng, 2) else noise(rng, 40)
    name = seldom(rng, name, ["", "Nothing", "ModelInfer/x", "a" * 5000])
    # No client leaves: TRITON-FAULTS.md#cancellations.
    return Request("TRITON_GRPC_PORT", data, f"/{SERVICE.full_name}/{name}")


def infer_message(rng: Random, config: dict[str, Any]) -> Any:
    message = service_pb2.ModelInferRequest(
        model_name=seldom(rng, config["name"], NAMES),
        model_version=seldom(rng, "", ["1", "2", "-1", "x", str(2**64)]),
        id=seldom(rng, "", NAMES),
    )
    is_raw = one_in(rng, 2)
    for tensor in tensors(rng, config):
        shape = [min(size, 2**63 - 1) for size in tensor["shape"]]
        added = message.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=shape)
        if seldom(rng, is_raw, [True, False]):
            message.raw_input_contents.append(raw(rng, tensor))
        if not seldom(rng, is_raw, [True, False]):
            fill(added.contents, rng, tensor)
        if one_in(rng, 20):
            added.parameters["shared_memory_region"].string_param = "region"
            added.parameters["shared_memory_byte_size"].int64_param = rng.choice([-1, 0, 64, 2**62])
    for output in config["output"]:
        if one_in(rng, 2):
            added = message.outputs.add(name=seldom(rng, output["name"], NAMES))
            # Not for an output of texts: TRITON-FAULTS.md#bad-requests.
            if one_in(rng, 20) and output["data_type"] != "TYPE_STRING":
                added.parameters["classification"].int64_param = rng.choice([-1, 0, 1, 2**62])
    if one_in(rng, 10):
        kind, value = rng.choice([("bool_param", True), ("int64_param", -1), ("string_param", "x")])
        setattr(message.parameters[rng.choice(PARAMETERS)], kind, value)
    return message


def fill(contents: Any, rng: Random, tensor: dict[str, Any]) -> None:
    """Put the values into the field of the tensor's type, or seldom into another one."""
    own = re.sub(r"int(8|16|32)$", "int", tensor["datatype"].lower()) + "_contents"
    name = seldom(rng, own if own in CONTENTS else "bytes_contents", CONTENTS)
    for value in tensor["data"]:
        if name == "bytes_contents":
            contents.bytes_contents.append(value if isinstance(value, bytes) else b"x")
        else:
            getattr(contents, name).append(0 if isinstance(value, bytes) else int(value) % 2)


def any_message(rng: Random, message: Any, model: str) -> Any:
    """Give some fields of the message values of their types."""
    for field in message.DESCRIPTOR.fields:
        values: list[Any] = {
            field.CPPTYPE_STRING: [model, *NAMES],
            field.CPPTYPE_BOOL: [True, False],
            field.CPPTYPE_INT64: [0, 1, 64, 2**63 - 1],
            field.CPPTYPE_UINT64: [0, 1, 64, 2**63 - 1],
        }.get(field.cpp_type, [])
        if values and not field.is_repeated and one_in(rng, 2):
            value = rng.choice(values)
            setattr(message, field.name, value.encode() if field.type == field.TYPE_BYTES else value)
    return message

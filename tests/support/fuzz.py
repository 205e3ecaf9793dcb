"""Bad requests for every public input, which Hypothesis makes from the configurations of the models.

A request begins as a good one. Each of its parts is replaced by a bad one with a small probability, so that most
requests are wrong in one or two places and reach the code behind the first check.
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
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from gateway.inference import DTYPES

KEY = "a-key-for-the-fuzzer"
SHOWN = 600  # bytes of a request in a report
# Replaced by arrays in arrays when the JSON is written: json.dumps cannot write them.
DEEP = "a deeply nested value"
HUGE = "long " * 25_000
TEXTS = ["Which battery fits?", "a", "비 그친 뒤 골목에"]
BAD_TEXTS = [
    *(b"", b"\0", b" ", b"\xff\xfe", b"\xed\xa0\x80", b"\xf0\x9f", b"a\0b", HUGE.encode(), b"[MASK] [PAD] [SEP]"),
    *("\u202e\u0301\ufeff\U0001f469\u200d\U0001f467".encode(), b"{{ 7 * 7 }}", b"%s%n", b"\\u0000", b"\r\n\r\n"),
]
NAMES = ["", "nothing", "..", "../..", "a" * 5000, "\0", "é", "embedding/../tokenizer", "%2e%2e", "a b", "*"]
NUMBERS = [0, -1, 1, 2, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30, 1.5, 1e300]
BATCHES = [[], [0], [0, 1], [1], [2], [1, 1], [1, 1, 1], [-1, 1], [1, -1], [65, 1], [1, 0], [1] * 100, [3, 7]]
SHAPES = st.sampled_from([*BATCHES, [2**31, 1], [2**32, 2**32], [2**62, 4], [2**63 - 1, 1]])
VALUES = ["", None, True, {}, [], [[]], [None], {"a": 1}, DEEP, HUGE, math.nan, math.inf, "\ud800", *NUMBERS, *NAMES]
JUNK = st.sampled_from(VALUES).map(copy.deepcopy) | st.text(max_size=8)
METHODS = ["GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "X", "PRI"]
CONTENT_TYPES = ["text/plain", "", "application/octet-stream", "multipart/form-data; boundary=x", "\xff"]
# Lines that every server can live with, and lines after which it may end the connection.
ODD_LINES = [
    *("Connection: close", "Connection: Upgrade", "Expect: 100-continue", "Accept-Encoding: gzip", "Accept: image/png"),
    *("Accept-Encoding: nonsense", "Authorization: Basic %%%", "Authorization: Bearer \xff", "Host: evil.example"),
    *("Origin: null", "X-Request-Id: \xff", "triton-admin-key: guess", "traceparent: 00-0-0-0"),
]
BROKEN_LINES = [
    *(
        "Transfer-Encoding: nonsense",
        "Content-Length: 1, 2",
        "Content-Length: -1",
        "Content-Length : 3",
        "Upgrade: h2c",
    ),
    *(
        f"Content-Length: {'9' * 30}",
        f"X-Long: {'x' * 100_000}",
        "X-Control: a\0b",
        "X\xff: \xfe",
        "no colon",
        "Expect: x",
    ),
]


class Configs(dict[str, Any]):
    """Configurations of models by name, which Hypothesis repeats in every report."""

    def __repr__(self) -> str:
        return f"Configs({', '.join(self)})"


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


def one_in(draw: st.DrawFn, count: int) -> bool:
    return draw(st.integers(1, count)) == count


def seldom(draw: st.DrawFn, good: Any, bad: Any) -> Any:
    """Return one of the bad values, a list or a strategy, in one of ten cases."""
    return draw(st.sampled_from(bad) if isinstance(bad, list) else bad) if one_in(draw, 10) else good


# --- tensors --------------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the inputs of a request to a model with this configuration. Their `data` has bytes or numbers."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    batch = [rows] if config["max_batch_size"] else []
    drawn = []
    for spec in config["input"]:
        if spec.get("optional") and draw(st.booleans()):
            continue
        shape = [*batch, *(length if int(size) < 0 else int(size) for size in spec["dims"])]
        datatype = spec["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
        good = [text.encode() for text in TEXTS] if datatype == "BYTES" else [0, 1, 2]
        values = st.sampled_from(seldom(draw, good, st.just(BAD_TEXTS if datatype == "BYTES" else NUMBERS)))
        count = seldom(draw, math.prod(shape), [0, 1, 2, 65, 300])
        few = draw(st.lists(values, min_size=1, max_size=3))
        drawn.append(
            {
                "name": seldom(draw, spec["name"], NAMES),
                "shape": seldom(draw, shape, SHAPES),
                "datatype": seldom(draw, datatype, [*DTYPES, "BYTES", "BF16", "STRING", "", "bytes", "FP8"]),
                "data": (few * count)[:count],
            }
        )
    return seldom(draw, drawn, [[], drawn * 2, drawn[1:], drawn[::-1]])


@st.composite
def raw(draw: st.DrawFn, tensor: dict[str, Any]) -> bytes:
    """Return the tensor's data in Triton's binary format, or bytes that lie about their length."""
    if any(isinstance(value, bytes) for value in tensor["data"]):
        lies = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
        lengths = [seldom(draw, len(value), lies) if n < 3 else len(value) for n, value in enumerate(tensor["data"])]
        data = b"".join(n.to_bytes(4, "little") + value for n, value in zip(lengths, tensor["data"], strict=True))
    else:
        data = np.array([int(value) % 127 for value in tensor["data"]], DTYPES.get(tensor["datatype"], "u1")).tobytes()
    return seldom(draw, data, damaged(data))


# --- JSON and bytes -------------------------------------------------------------------------------------------------


class Twin(str):
    """A key that an object of JSON can have twice."""

    __slots__ = ()
    __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]


@st.composite
def mutated(draw: st.DrawFn, tree: Any) -> Any:
    """Return JSON of which up to two parts are replaced, removed, renamed or repeated."""
    root = [copy.deepcopy(tree)]
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        places = list(parts(root))
        place, key = places[draw(st.integers(0, len(places) - 1))]
        action = draw(st.sampled_from(["replace", "remove", "add", "wrap"]))
        if action == "remove" and place is not root:
            del place[key]
        elif action == "wrap":
            place[key] = [place[key]]
        elif action == "add" and isinstance(place, dict):
            place[draw(st.sampled_from([Twin(key), *NAMES]))] = draw(JUNK)
        elif action == "add" and place is not root:
            place.append(draw(JUNK))
        else:
            place[key] = draw(JUNK)
    return root[0]


def parts(place: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(place.items() if isinstance(place, dict) else enumerate(place[:8])):
        yield place, key
        if isinstance(value, dict | list):
            yield from parts(value)


@st.composite
def json_bytes(draw: st.DrawFn, tree: Any, depth: int) -> bytes:
    """Mutate JSON and write it. Bytes that are not UTF-8 become what they are, or escapes of half a character."""
    text = json.dumps(
        draw(mutated(tree)),
        ensure_ascii=draw(st.booleans()),
        default=lambda data: data.decode(errors="surrogateescape"),
    )
    data = text.encode(errors="surrogatepass" if "\ud800" in text else "surrogateescape")
    data = data.replace(json.dumps(DEEP).encode(), b"[" * depth + b"]" * depth)
    return seldom(draw, data, damaged(data) | st.sampled_from([b"", b"[" * depth, b'{"a":' * depth, b"\x1f\x8b"]))


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Replace a part of the bytes."""
    start = draw(st.integers(0, len(data)))
    end = draw(st.sampled_from([start, start + 1, start + 4, len(data)]))
    patches = [b"", b"\0", b"\xff\xfe", b'"', b"{", b"1" * 400, b"\xff" * 8, b"\x80" * 12]
    return data[:start] + draw(st.sampled_from(patches) | st.binary(max_size=8)) + data[end:]


# --- HTTP -----------------------------------------------------------------------------------------------------------


@st.composite
def http(draw: st.DrawFn, to: str, method: str, path: str, body: bytes, header: str = "") -> Request:
    """Put a body on the wire, with lies in the head. `header` is a line of it."""
    if one_in(draw, 40):
        return Request(to, draw(st.binary(max_size=64) | damaged(b"GET / HTTP/1.1\r\n\r\n")), "GET", framed=False)
    segments = path.split("/")
    position = draw(st.integers(1, len(segments) - 1))
    odd = ["", "..", "%2e%2e", "%00", "%ff", "%", "7", "-1", "x" * 5000, "..%2f..%2fetc", "?a=%ff", "é"]
    segments[position] = seldom(draw, segments[position], odd)
    method = seldom(draw, method, METHODS)
    length, body, whole = draw(framing(body))
    lines = [
        f"{method} {'/'.join(segments)} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {KEY}",
        header,
        length,
    ]
    lines.append(f"Content-Type: {seldom(draw, 'application/json', CONTENT_TYPES)}")
    lines.append(seldom(draw, "", ODD_LINES))
    broken = seldom(draw, "", BROKEN_LINES)
    head = "\r\n".join(filter(None, [*lines, broken])) + "\r\n\r\n"
    framed = whole and not broken and method.isupper() and method not in ("CONNECT", "PRI", "X")
    return Request(to, head.encode("latin-1") + body, method, framed, leaves=one_in(draw, 20))


@st.composite
def framing(draw: st.DrawFn, body: bytes) -> tuple[str, bytes, bool]:
    """Return the line of the head that tells where the body ends, the body as it is sent, and whether they agree."""
    kind = draw(st.sampled_from(["right"] * 12 + ["short", "long", "none", "chunks", "chunks", "wrong chunks"]))
    if "chunks" in kind:
        size = draw(st.integers(1, 2000)) + len(body) // 1000  # the gateway limits the bytes between chunks
        chunks = [body[start : start + size] for start in range(0, len(body), size)]
        data = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
        return "Transfer-Encoding: chunked", draw(damaged(data)) if kind == "wrong chunks" else data, kind == "chunks"
    if one_in(draw, 20):
        name, compress = draw(st.sampled_from([("gzip", gzip.compress), ("deflate", zlib.compress), ("gzip", bytes)]))
        data = compress(body)
        return f"Content-Encoding: {name}\r\nContent-Length: {len(data)}", data, True
    lie = {"short": len(body) // 2, "long": len(body) + draw(st.sampled_from([1, 1000, 2**40]))}.get(kind, len(body))
    return "" if kind == "none" else f"Content-Length: {lie}", body, kind == "right"


@st.composite
def triton_http(draw: st.DrawFn, configs: Configs, depth: int) -> Request:
    """Return a request to any endpoint of Triton's HTTP server, or for its metrics."""
    config = configs[draw(st.sampled_from(sorted(configs)))]
    path = f"/v2/models/{config['name']}" + seldom(draw, "", ["/versions/1"])
    kind = draw(st.sampled_from(["json", "binary", "generate", "other"]))
    if kind == "other":
        path, tree = draw(st.sampled_from(endpoints(config["name"])))
        to = "TRITON_METRICS_PORT" if path == "/metrics" else "TRITON_HTTP_PORT"
        return draw(http(to, "POST", path, draw(json_bytes(tree, depth))) if tree else http(to, "GET", path, b""))
    inputs = draw(tensors(config))
    if kind == "generate":
        tree = {tensor["name"]: tensor["data"][0] if len(tensor["data"]) == 1 else tensor["data"] for tensor in inputs}
        path += draw(st.sampled_from(["/generate", "/generate_stream"]))
        return draw(http("TRITON_HTTP_PORT", "POST", path, draw(json_bytes(tree, depth))))
    tree = {"inputs": inputs, "outputs": [{"name": output["name"]} for output in config["output"] if one_in(draw, 2)]}
    if kind == "json":
        return draw(http("TRITON_HTTP_PORT", "POST", f"{path}/infer", draw(json_bytes(tree, depth))))
    data = [draw(raw(tensor)) for tensor in inputs]
    for tensor, part in zip(inputs, data, strict=True):
        tensor["parameters"] = {"binary_data_size": seldom(draw, len(part), NUMBERS)}
        tensor.pop("data", None)
    head = draw(json_bytes(tree | {"parameters": {"binary_data_output": draw(st.booleans())}}, depth))
    lies = ["", "abc", 0, -1, len(head) - 1, len(head) + 1, 10**6, 2**31, 2**63, 2**64]
    header = f"Inference-Header-Content-Length: {seldom(draw, len(head), lies)}"
    return draw(http("TRITON_HTTP_PORT", "POST", f"{path}/infer", head + b"".join(data), header))


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


@st.composite
def gateway_http(draw: st.DrawFn, bodies: list[tuple[str, Any]], depth: int) -> Request:
    """Return a request to a route of the gateway. `bodies` has paths, each with a good body, or None for a GET."""
    path, tree = draw(st.sampled_from(bodies))
    if tree is None:
        return draw(http("GATEWAY_PORT", "GET", path, b""))
    body = draw(json_bytes(with_text(tree, seldom(draw, None, BAD_TEXTS)), depth))
    return draw(http("GATEWAY_PORT", "POST", path, body))


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


@st.composite
def triton_grpc(draw: st.DrawFn, configs: Configs) -> Request:
    """Return a message to any method of Triton's gRPC server."""
    config = configs[draw(st.sampled_from(sorted(configs)))]
    name = draw(st.sampled_from(["ModelInfer", "ModelInfer", "ModelStreamInfer", "other"]))
    if name == "other":
        method = draw(st.sampled_from([method for method in SERVICE.methods if "Infer" not in method.name]))
        name, message = method.name, draw(any_message(method.input_type._concrete_class(), config["name"]))
    else:
        message = draw(infer_message(config))
    data = message.SerializeToString()
    data = seldom(draw, data, damaged(data) | st.binary(max_size=40))
    name = seldom(draw, name, ["", "Nothing", "ModelInfer/x", "a" * 5000])
    return Request("TRITON_GRPC_PORT", data, f"/{SERVICE.full_name}/{name}", leaves=one_in(draw, 20))


@st.composite
def infer_message(draw: st.DrawFn, config: dict[str, Any]) -> Any:
    message = service_pb2.ModelInferRequest(
        model_name=seldom(draw, config["name"], NAMES),
        model_version=seldom(draw, "", ["1", "2", "-1", "x", str(2**64)]),
        id=seldom(draw, "", NAMES),
    )
    is_raw = draw(st.booleans())
    for given in draw(tensors(config)):
        shape = [min(size, 2**63 - 1) for size in given["shape"]]
        added = message.inputs.add(name=given["name"], datatype=given["datatype"], shape=shape)
        if seldom(draw, is_raw, [True, False]):
            message.raw_input_contents.append(draw(raw(given)))
        if not seldom(draw, is_raw, [True, False]):
            fill(added.contents, draw, given)
        if one_in(draw, 20):
            added.parameters["shared_memory_region"].string_param = "region"
            added.parameters["shared_memory_byte_size"].int64_param = draw(st.sampled_from([-1, 0, 64, 2**62]))
    for output in config["output"]:
        if draw(st.booleans()):
            added = message.outputs.add(name=seldom(draw, output["name"], NAMES))
            if one_in(draw, 20):
                added.parameters["classification"].int64_param = draw(st.sampled_from([-1, 0, 1, 2**62]))
    if one_in(draw, 10):
        kind, value = draw(st.sampled_from([("bool_param", True), ("int64_param", -1), ("string_param", "x")]))
        setattr(message.parameters[draw(st.sampled_from(PARAMETERS))], kind, value)
    return message


def fill(contents: Any, draw: st.DrawFn, tensor: dict[str, Any]) -> None:
    """Put the values into the field of the tensor's type, or seldom into another one."""
    own = re.sub(r"int(8|16|32)$", "int", tensor["datatype"].lower()) + "_contents"
    name = seldom(draw, own if own in CONTENTS else "bytes_contents", CONTENTS)
    for value in tensor["data"]:
        if name == "bytes_contents":
            contents.bytes_contents.append(value if isinstance(value, bytes) else b"x")
        else:
            getattr(contents, name).append(0 if isinstance(value, bytes) else int(value) % 2)


@st.composite
def any_message(draw: st.DrawFn, message: Any, model: str) -> Any:
    """Give some fields of the message values of their types."""
    for field in message.DESCRIPTOR.fields:
        values: list[Any] = {
            field.CPPTYPE_STRING: [model, *NAMES],
            field.CPPTYPE_BOOL: [True, False],
            field.CPPTYPE_INT64: [0, 1, 64, 2**63 - 1],
            field.CPPTYPE_UINT64: [0, 1, 64, 2**63 - 1],
        }.get(field.cpp_type, [])
        if values and not field.is_repeated and draw(st.booleans()):
            value = draw(st.sampled_from(values))
            setattr(message, field.name, value.encode() if field.type == field.TYPE_BYTES else value)
    return message

"""Requests to the embedding system."""

from __future__ import annotations

import json
import urllib.request

import numpy as np

# As published, except for the port.
CURL = """curl -X POST http://localhost:8000/v2/models/{model}/versions/1/infer \\
   -H 'Content-Type: application/json' \\
   -d '{{"name": "embedding", "inputs": [{{"name": "input_text", "shape": [2, 1], "datatype": "BYTES", "data": \
[["비 그친 뒤 골목에…빵 굽는 냄새가 퍼진다"], ["막차를 놓쳤다면? 심야 버스 노선 안내"]]}}]}}'"""


def body(*texts: bytes, output: str = "") -> tuple[bytes, dict[str, str]]:
    """Return a binary request for one output, or all. Unlike JSON, it can carry bytes that are not UTF-8."""
    tensor = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    header = {
        "inputs": [
            {
                "name": "input_text",
                "shape": [len(texts), 1],
                "datatype": "BYTES",
                "parameters": {"binary_data_size": len(tensor)},
            }
        ],
        # Triton ignores this for outputs that the request names.
        "parameters": {"binary_data_output": True},
        **({"outputs": [{"name": output, "parameters": {"binary_data": True}}]} if output else {}),
    }
    encoded = json.dumps(header).encode()
    return encoded + tensor, {"Inference-Header-Content-Length": str(len(encoded))}


def embed(stack, *texts: str | bytes) -> np.ndarray:
    data, headers = body(*(t.encode() if isinstance(t, str) else t for t in texts), output="output__0")
    request = urllib.request.Request(stack.http + "/v2/models/embedding/infer", data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        raw = response.read()[int(response.headers["Inference-Header-Content-Length"]) :]
    return np.frombuffer(raw, np.float32).reshape(len(texts), -1)

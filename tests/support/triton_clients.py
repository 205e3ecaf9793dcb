"""Triton's client library, and requests to `lookup`: a model that maps `ids` to equal numbers `row`."""

from __future__ import annotations

import time
import uuid
from types import ModuleType

import numpy as np
import tritonclient.http as httpclient
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException, shared_memory

from tests.support.stacks import TestStack

IDS = np.array([[3], [0], [99]])


def address(stack: TestStack, library: ModuleType) -> str:
    port = "TRITON_HTTP_PORT" if library in (httpclient, http_aio) else "TRITON_GRPC_PORT"
    return f"127.0.0.1:{stack.environment[port]}"


def connect(stack: TestStack, library: ModuleType, **options: object):
    return library.InferenceServerClient(address(stack, library), **options)


def ids_input(library: ModuleType, ids: np.ndarray = IDS):
    tensor = library.InferInput("ids", list(ids.shape), "INT64")
    tensor.set_data_from_numpy(ids)
    return tensor


def unregister_all(client, headers: dict[str, str]) -> None:
    """Unregister the regions of shared memory. Triton lets a request's regions go just after its response."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return client.unregister_system_shared_memory(headers=headers)
        except InferenceServerException as error:
            if "Failed to unregister" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def exchange_over_shared_memory(client, library: ModuleType, headers: dict[str, str]) -> np.ndarray:
    """Send IDS to `lookup` in one region, and receive its answer in another."""
    sizes = {"ids": IDS.nbytes, "row": IDS.size * 4}
    regions = {}
    try:
        for name, size in sizes.items():
            key = f"/test-{uuid.uuid4()}"
            regions[name] = shared_memory.create_shared_memory_region(name, key, size)
            client.register_system_shared_memory(name, key, size, headers=headers)
        shared_memory.set_shared_memory_region(regions["ids"], [IDS])
        tensor = library.InferInput("ids", list(IDS.shape), "INT64")
        tensor.set_shared_memory("ids", sizes["ids"])
        output = library.InferRequestedOutput("row")
        output.set_shared_memory("row", sizes["row"])
        client.infer("lookup", [tensor], outputs=[output])
        return shared_memory.get_contents_as_numpy(regions["row"], np.float32, IDS.shape).copy()
    finally:
        unregister_all(client, headers)
        for region in regions.values():
            shared_memory.destroy_shared_memory_region(region)

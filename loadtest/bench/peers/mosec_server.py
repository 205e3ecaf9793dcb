"""mosec: HTTP and batching are in Rust, the model in Python workers."""

from __future__ import annotations

import os
from typing import Any

import orjson
from mosec import Server, Worker

from loadtest.bench.embedder import Embedder, Options


class EmbedWorker(Worker):
    def __init__(self) -> None:
        self.embedder = Embedder(Options.read())

    def deserialize(self, data: bytes) -> str:
        return orjson.loads(data)["text"]

    def forward(self, data: str | list[str]) -> Any:
        if isinstance(data, str):  # with a maximum batch size of 1
            return self.embedder.embed([data])[0]
        return self.embedder.embed(data)

    def serialize(self, data: object) -> bytes:
        return orjson.dumps({"embedding": data}, option=orjson.OPT_SERIALIZE_NUMPY)


if __name__ == "__main__":
    options = Options.read()
    os.environ |= {"MOSEC_PORT": str(options.port), "MOSEC_ADDRESS": "127.0.0.1", "MOSEC_LOG_LEVEL": "warning"}
    server = Server()
    server.append_worker(
        EmbedWorker,
        num=options.processes,
        max_batch_size=options.batch,
        max_wait_time=options.wait_ms,
        route="/embed",
    )
    server.run()

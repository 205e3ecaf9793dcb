"""LitServe: its workers take batches from a queue."""

from __future__ import annotations

from typing import Any

import litserve
import orjson
from fastapi import Response

from loadtest.bench.embedder import Embedder, Options


class EmbedApi(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.embedder = Embedder(Options.read())

    def decode_request(self, request: dict) -> str:
        return request["text"]

    def batch(self, inputs: list) -> list:
        return inputs

    def predict(self, texts: str | list[str]) -> Any:
        if isinstance(texts, str):  # with a maximum batch size of 1
            return self.embedder.embed([texts])[0]
        return self.embedder.embed(texts)

    def unbatch(self, output: list) -> list:
        return output

    def encode_response(self, output: object) -> Response:
        body = orjson.dumps({"embedding": output}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(body, media_type="application/json")


if __name__ == "__main__":
    options = Options.read()
    api = EmbedApi(max_batch_size=options.batch, batch_timeout=options.wait_ms / 1000, api_path="/embed")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=options.processes, fast_queue=True)
    server.run(host="127.0.0.1", port=options.port, log_level="warning", generate_client_file=False, access_log=False)

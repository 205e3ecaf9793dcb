"""Ray Serve: a proxy process passes requests to replicas, which batch them."""

from __future__ import annotations

import asyncio
import os
import signal

import orjson
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from loadtest.bench.embedder import Embedder, Options

OPTIONS = Options.read()


@serve.deployment(num_replicas=OPTIONS.processes, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
class EmbedDeployment:
    def __init__(self) -> None:
        self.embedder = Embedder(OPTIONS)

    @serve.batch(max_batch_size=OPTIONS.batch, batch_wait_timeout_s=OPTIONS.wait_ms / 1000)
    async def embed(self, texts: list[str]) -> list:
        # On a thread, so that the next requests can arrive meanwhile.
        return await asyncio.to_thread(self.embedder.embed, texts)

    async def __call__(self, request: Request) -> Response:
        vector = await self.embed(orjson.loads(await request.body())["text"])
        body = orjson.dumps({"embedding": vector}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(body, media_type="application/json")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # CPUs are a number that Ray counts down, not a limit of threads.
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=100_000_000,
        _temp_dir=f"{os.environ['TMPDIR']}/ray",
        log_to_driver=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": OPTIONS.port})
    try:
        serve.run(EmbedDeployment.bind(), route_prefix="/embed", blocking=True)  # type: ignore[attr-defined]
    finally:
        ray.shutdown()

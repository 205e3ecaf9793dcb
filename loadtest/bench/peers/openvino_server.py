"""The policy of OpenVINO Model Server: one inference for each request, on as many streams as there are cores.

It runs behind the HTTP server of the other peers, because no package registry has OpenVINO Model Server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openvino
import orjson
import uvicorn
from fastapi import FastAPI, Request, Response

from loadtest.bench.embedder import Embedder, Options


def create_app() -> FastAPI:
    options = Options.read()
    embedder = Embedder(options)
    queue = openvino.AsyncInferQueue(embedder.engine.compiled, options.streams)
    free = asyncio.Semaphore(options.streams)  # without one, start_async() would hold up the event loop

    def answer(request: Any, waiting: tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]) -> None:
        loop, future = waiting
        loop.call_soon_threadsafe(future.set_result, request.get_output_tensor(0).data[0].copy())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        queue.set_callback(answer)
        yield
        queue.wait_all()

    app = FastAPI(lifespan=lifespan)

    @app.post("/embed")
    async def embed(request: Request) -> Response:
        feed = embedder.feed([orjson.loads(await request.body())["text"]])
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        async with free:
            queue.start_async(feed, (loop, future))
            vector = await future
        body = orjson.dumps({"embedding": vector}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(body, media_type="application/json")

    return app


if __name__ == "__main__":
    options = Options.read()
    uvicorn.run(create_app(), port=options.port, access_log=False, log_level="warning")

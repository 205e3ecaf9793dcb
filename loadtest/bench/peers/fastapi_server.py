"""Plain FastAPI: each request is one run of the model, on a thread of the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread
import orjson
import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel

from loadtest.bench.embedder import Embedder, Options


class Text(BaseModel):
    text: str


def create_app() -> FastAPI:
    options = Options.read()
    embedder = Embedder(options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # The default pool has 40 threads, which take the cores from each other.
        anyio.to_thread.current_default_thread_limiter().total_tokens = options.pool
        yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/embed")
    def embed(request: Text) -> Response:
        (vector,) = embedder.embed([request.text])
        body = orjson.dumps({"embedding": vector}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(body, media_type="application/json")

    return app


if __name__ == "__main__":
    options = Options.read()
    uvicorn.run(
        f"{__spec__.name}:create_app",
        factory=True,
        port=options.port,
        workers=options.processes,
        access_log=False,
        log_level="warning",
    )

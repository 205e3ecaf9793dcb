"""The policy of text-embeddings-inference on a CPU: first come first served, padded, at most `batch` texts in a batch.

Its Rust program is in no package registry, so this is its policy, not its code.
"""

from __future__ import annotations

import asyncio

import orjson
import uvicorn

from bench.embedder import Embedder, Options


class Server:
    """An ASGI application with one queue, which one loop empties."""

    def __init__(self) -> None:
        self.options = Options.read()
        self.embedder = Embedder(self.options)
        self.queue: asyncio.Queue[tuple[str, asyncio.Future]] = asyncio.Queue()

    async def __call__(self, scope: dict, receive, send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        answer = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((orjson.loads(body)["text"], answer))
        content = orjson.dumps({"embedding": await answer}, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def run_batches(self) -> None:
        while True:
            batch = [await self.queue.get()]
            while len(batch) < self.options.batch and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            vectors = await asyncio.to_thread(self.embedder.embed, [text for text, _ in batch])
            for (_, answer), vector in zip(batch, vectors, strict=True):
                if not answer.done():  # its client may have left
                    answer.set_result(vector)


async def main() -> None:
    app = Server()
    config = uvicorn.Config(app, port=app.options.port, access_log=False, log_level="warning", lifespan="off")
    async with asyncio.TaskGroup() as group:
        batches = group.create_task(app.run_batches())
        await uvicorn.Server(config).serve()
        batches.cancel()


if __name__ == "__main__":
    asyncio.run(main())

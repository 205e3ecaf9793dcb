"""A worker that does nothing, for ever: no CPU time ends it."""

import time

from serving.triton.worker_process import serve_lines

if __name__ == "__main__":
    serve_lines(lambda _: time.sleep(3600), 0.1, 1 << 30)  # type: ignore[func-returns-value]

"""Check and compile `structured_outputs` before a request waits for its text, and off the thread that generates."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from serving.structure.worker import COMPILE_SECONDS, Structure
from serving.triton.types import BadRequest, Busy
from serving.triton.worker_process import WorkerEnded, WorkerProcess

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Each of these processes has the vocabulary: 100 MB with 150,000 tokens.
WORKERS = 2
MAX_BYTES = 256 * 1024
# The error of a text whose grammar allows no token.
DEAD_END = "option 'structured_outputs': no token of this model can continue the text"
MAX_CACHED, MAX_WAITING = 200, 1000
# The memory for compiled structures. A JSON schema takes about 1 MB with 150,000 tokens.
MAX_CACHED_BYTES = 256 << 20


class Structures:
    """Compiles each structure once, and keeps the last ones."""

    def __init__(
        self,
        tokens: Callable[[], Sequence[bytes]],
        end_tokens: Sequence[int],
        takes_grammars: bool,
        prepare: Callable[[Structure], Any],
    ) -> None:
        """Take `prepare`, which returns a structure as the engine takes it, off the thread that generates."""
        self.tokens, self.end_tokens, self.takes_grammars, self.prepare = tokens, end_tokens, takes_grammars, prepare
        self.cached: OrderedDict[str, Future[Any]] = OrderedDict()
        self.sizes: dict[str, int] = {}  # of the cached ones that compiled
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="structures")
        self.local = threading.local()

    def compile(self, structure: Mapping[str, Any]) -> Future[Any]:
        """Return what the engine takes, once it is there, or BadRequest. Raise that at once for what is too large."""
        key = json.dumps(structure)
        if len(key) > MAX_BYTES:
            raise BadRequest(
                f"option 'structured_outputs' has {len(key)} characters; at most {MAX_BYTES} are allowed",
                "structured_outputs",
            )
        if not self.end_tokens:
            raise BadRequest(
                "option 'structured_outputs': this model has no token that ends a text", "structured_outputs"
            )
        with self.lock:
            if (future := self.cached.get(key)) is None:
                if sum(not other.done() for other in self.cached.values()) >= MAX_WAITING:
                    raise Busy("too many structures wait to be compiled: try again later")
                future = self.cached[key] = self.pool.submit(self.compile_in_worker, key)
            self.cached.move_to_end(key)
            while len(self.cached) > MAX_CACHED or sum(self.sizes.values()) > MAX_CACHED_BYTES:
                oldest = next(iter(self.cached))
                if oldest == key or not self.cached[oldest].done():
                    break
                del self.cached[oldest]
                self.sizes.pop(oldest, None)
        return future

    def compile_in_worker(self, key: str) -> Any:
        try:
            if not hasattr(self.local, "worker"):
                self.local.worker = new_worker(self.tokens(), self.end_tokens, self.takes_grammars)
            structure = Structure(**self.local.worker.ask(key))
        except WorkerEnded as error:  # the next structure gets another one
            vars(self.local).pop("worker", None)
            raise BadRequest(
                f"option 'structured_outputs': it takes {error} to compile: make it smaller", "structured_outputs"
            ) from None
        except BadRequest as error:
            raise BadRequest(f"option 'structured_outputs': {error}", "structured_outputs") from None
        prepared = self.prepare(structure)
        with self.lock:
            self.sizes[key] = structure.size
        return prepared

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def new_worker(tokens: Sequence[bytes], end_tokens: Sequence[int], takes_grammars: bool) -> WorkerProcess:
    worker = WorkerProcess("serving.structure.worker", COMPILE_SECONDS)
    texts = [token.decode("latin-1") for token in tokens]
    worker.ask(json.dumps({"tokens": texts, "end_tokens": list(end_tokens), "takes_grammars": takes_grammars}))
    return worker


def vocabulary(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """Return the bytes of each token. Those of special tokens are empty: no grammar allows these tokens."""
    tokens = [b""] * size
    if not (decode := byte_decoder(tokenizer)):
        raise BadRequest(
            "option 'structured_outputs': it is not known which bytes the tokens of this tokenizer are",
            "structured_outputs",
        )
    for text, id in tokenizer.get_vocab(with_added_tokens=False).items():
        if id < size:
            tokens[id] = decode(text)
    for id, added in tokenizer.get_added_tokens_decoder().items():
        if id < size:
            tokens[id] = b"" if added.special else added.content.encode()
    return tokens


def byte_decoder(tokenizer: Tokenizer) -> Callable[[str], bytes] | None:
    """Return the function that makes bytes of a token, None if the tokenizer's kind is unknown."""
    decoder = (tokenizer.decoder.__getstate__() if tokenizer.decoder else b"").decode()
    if '"ByteLevel"' in decoder:
        return byte_level
    # SentencePiece writes this character in place of a space.
    return sentence_piece if "\u2581" in decoder or "\\u2581" in decoder else None


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    """Return the bytes of a token, None if they are unknown."""
    text, decode = tokenizer.id_to_token(token), byte_decoder(tokenizer)
    return list(decode(text)) if text and decode else None


def byte_level(text: str) -> bytes:
    """Return the bytes of a token of GPT-2's kind, which writes each byte as a character that can be printed."""
    return b"".join(BYTES.get(char, char.encode()) for char in text)


def sentence_piece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return text.replace("\u2581", " ").encode()


def printable_bytes() -> dict[str, bytes]:
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    codes = dict(zip(printed, printed, strict=True)) | {byte: 256 + place for place, byte in enumerate(others)}
    return {chr(code): bytes([byte]) for byte, code in codes.items()}


BYTES = printable_bytes()

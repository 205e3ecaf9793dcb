"""Documents that a grammar allows, written at random without a model."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import torch

from serving.structure.worker import Structure, compile_structure, new_compiler, xgrammar

# Each byte is a token, and so are some texts that cross the borders of JSON's parts.
TOKENS = [
    *(bytes([byte]) for byte in range(256)),
    *(b'":', b'"}', b'",', b'{"', b"true", b"12", b'\\"', b"\\n", "é".encode(), b"abc", b'"]'),
    b"",
]
END = len(TOKENS) - 1
CLOSING = {TOKENS.index(token) for token in (b'"', b"}", b"]", b'"}', b'"]')} | {END}


@cache
def compiler() -> Any:
    return new_compiler(xgrammar(), TOKENS, [END])


def document(structure: Structure, seed: int, limit: int = 150) -> str:
    """Return one text; after `limit` tokens, close what can be closed."""
    choice = random.Random(seed)
    if structure.form == "grammar":  # OpenVINO GenAI prints a grammar, and compiles that
        structure = Structure("grammar", str(xgrammar().Grammar.from_ebnf(structure.text)))
    matcher = xgrammar().GrammarMatcher(compile_structure(compiler(), structure))
    mask = torch.full((1, (len(TOKENS) + 31) // 32), -1, dtype=torch.int32)
    written: list[int] = []
    while True:
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: len(TOKENS)]
        allowed = np.nonzero(bits)[0].tolist()
        closing = [token for token in allowed if token in CLOSING]
        token = choice.choice(closing if closing and (len(written) > limit or choice.random() < 0.25) else allowed)
        assert matcher.accept_token(token)
        if token == END:
            return b"".join(TOKENS[token] for token in written).decode()
        written.append(token)

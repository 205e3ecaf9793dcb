"""The committed texts: load tests send them, exports are verified with them, tests train tokenizers on them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from triton_transformers.settings import ROOT


@dataclass(frozen=True)
class Corpus:
    """A file of texts, one per line."""

    path: Path

    @property
    def name(self) -> str:
        """Return the path that a reader of a report finds the file at."""
        return str(self.path.relative_to(ROOT))

    @property
    def texts(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


FOLDER = Path(__file__).parent
# 256 texts in twelve languages, from two words to about a hundred.
MIXED = Corpus(FOLDER / "mixed.txt")
# The three texts of the published load test that WORKLOAD=published repeats.
PUBLISHED = Corpus(FOLDER / "published.txt")
# 2,168 texts in twelve languages, from one word to about ninety, which a cheaper graph may not confuse. They are about
# 16 topics, eight of them in all languages. For each topic and language, two queries, four subjects, four predicates
# and three further sentences were written by hand, and put together at random.
QUALITY = Corpus(FOLDER / "quality.txt")

"""Tasks of two texts: how long ones are cut, and where answers end.

tests/conformance/tasks compares their answers with those of the library.
"""

from __future__ import annotations

import itertools
import re

import pytest
import transformers

from export.check.served import served_system
from export.recipes.text.references import find_answer
from tests.conformance.tasks.rows import CONTEXTS
from tests.conformance.tasks.run import tensors
from tests.support.checkpoints import encoders
from tests.support.served import ask, assemble

pytestmark = pytest.mark.usefixtures("stored")


@pytest.mark.slow
@pytest.mark.parametrize("save", [encoders.save_bert, encoders.save_roberta], ids=["wordpiece", "byte-level"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_two_long_texts_are_truncated_as_by_the_library_in_few_parts(tmp_path, save, side):
    lengths, ends = (0, 33, 64, 65, 200), ("", "🦜x" * 9)
    texts = [" ".join(["long"] * length) + end for length, end in itertools.product(lengths, ends)]
    with served_system("m", assemble(encoders.save_cross_encoder(tmp_path / "m", save), tmp_path / "models")) as system:
        backend = system.models["m_encoder"].tokenization
        backend.tokenizer.enable_truncation(encoders.POSITIONS, strategy="longest_first", direction=side)
        for pair in itertools.product(texts, texts):
            (encoding,), expected = backend.encode([pair]), backend.tokenizer.encode(*pair)
            assert (encoding.ids, encoding.type_ids) == (expected.ids, expected.type_ids)
            assert bool(encoding.overflowing) == bool(expected.overflowing)
        (encoding,) = backend.encode([("long " * 1000, "long " * 2000)])
        assert len(encoding.overflowing) < 100  # the library alone makes 34,000


def test_parameter_returns_answers_that_end_within_words(tmp_path):
    weights = encoders.save_bert(tmp_path / "weights", "ForQuestionAnswering")
    network = transformers.AutoModelForQuestionAnswering.from_pretrained(weights).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    models = assemble(weights, tmp_path / "models")
    config = models / "m/config.pbtxt"
    text = config.read_text()
    config.write_text(re.sub(r'("align_to_words"\s+value \{\s+string_value: )"1"', r'\1"0"', text))
    assert config.read_text() != text
    (answer,) = ask(models, tensors({"question": ["why"] * 8, "context": CONTEXTS[:8]}))
    for row, context in enumerate(CONTEXTS[:8]):
        expected = find_answer(network, tokenizer, "why", context, encoders.POSITIONS, align_to_words=False)
        assert (answer["start"][row, 0], answer["end"][row, 0]) == (expected.start, expected.end)

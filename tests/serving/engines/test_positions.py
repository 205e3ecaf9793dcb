"""A text may have as many tokens as transformers finds positions for in the tables of its network."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from loadtest.bench.architectures.small_models import small_config
from serving.engines.positions import bound_texts, check_new_tokens, position_limit, position_limits
from serving.triton.types import BadRequest

ROWS = 40
# The class of each network, and the number of positions in a table of 40 rows.
WITH_TABLE = {
    "BartForConditionalGeneration": 40, "BertForMaskedLM": 40, "CTRLLMHeadModel": 40, "GPT2LMHeadModel": 40,
    "GPTJForCausalLM": 40, "MBartForConditionalGeneration": 40, "MPNetForMaskedLM": 38, "MarianMTModel": 40,
    "OPTForCausalLM": 40, "PegasusForConditionalGeneration": 40, "RobertaForMaskedLM": 38, "TrOCRForCausalLM": 40,
}  # fmt: skip
WITHOUT_TABLE = (
    "FSMTForConditionalGeneration", "LlamaForCausalLM", "M2M100ForConditionalGeneration", "T5ForConditionalGeneration",
    "XLNetLMHeadModel",
)  # fmt: skip


def network(name: str) -> torch.nn.Module:
    kind = getattr(transformers, name)
    sizes = {"vocab_size": 60, "max_position_embeddings": ROWS, "n_positions": ROWS}
    return kind(small_config(kind.config_class, sizes | {"pad_token_id": 1, "eos_token_id": 3})).eval()


def read(model: torch.nn.Module, length: int, is_answer: bool = False) -> None:
    """Let the model read a text, or for an answer also one that it has generated so far."""
    long, short = torch.full((1, length), 7), torch.full((1, 4), 7)
    inputs = {"input_ids": short if is_answer else long}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = long if is_answer else short
    with torch.no_grad():
        model(**inputs)


@pytest.mark.parametrize(("name", "limit"), WITH_TABLE.items())
def test_text_beyond_the_table_is_refused_where_the_library_fails(name, limit):
    model = network(name)
    kinds = (False, True) if model.config.is_encoder_decoder else (False,)
    for is_answer in kinds:
        with pytest.raises((IndexError, RuntimeError)):
            read(model, limit + 1, is_answer)
    bound_texts(model)
    for is_answer in kinds:
        read(model, limit, is_answer)
        with pytest.raises(BadRequest, match=f"a text of {limit + 1} tokens is longer than the model's {limit} pos"):
            read(model, limit + 1, is_answer)
    assert position_limit(model) == limit


@pytest.mark.parametrize("name", WITHOUT_TABLE)
def test_model_that_computes_positions_has_no_limit(name):
    model = network(name)
    bound_texts(model)
    read(model, ROWS + 9)
    assert not position_limits(model)
    assert position_limit(model) == math.inf


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"max_new_tokens": 40, "max_length": 41}, ""),
        ({"max_new_tokens": 41}, "max_new_tokens is 41, and the model has 40 positions"),
        ({"max_length": 42}, "max_length is 42, and the model has 40 positions"),
        ({"generate_kwargs": {"max_new_tokens": 90}}, "max_new_tokens is 90, and the model has 40 positions"),
        ({"generate_kwargs": None, "max_new_tokens": None}, ""),
    ],
)
def test_answer_beyond_the_table_is_refused_before_it_begins(parameters, reason):
    if not reason:
        return check_new_tokens(parameters, 40)
    with pytest.raises(BadRequest, match=reason):
        check_new_tokens(parameters, 40)

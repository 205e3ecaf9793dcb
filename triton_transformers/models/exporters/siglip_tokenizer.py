"""Convert the tokenizer of SigLIP, which transformers has only in Python, to one that the server runs."""

from __future__ import annotations

import re
import string
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, normalizers, processors
from transformers.convert_slow_tokenizer import SpmConverter


def fast_tokenizer(slow: Any) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer that makes the same tokens: of texts in lower case, without punctuation and further spaces.

    Only in texts with a special token, such as "</s>", it differs: it begins the next word as the first of a text.
    """
    tokenizer = SpmConverter(slow).converted()
    punctuation = f"[{re.escape(string.punctuation)}]"
    steps = [
        *([normalizers.Lowercase()] if slow.do_lower_case else []),
        normalizers.Replace(Regex(punctuation), ""),
        normalizers.Replace(Regex(r"\s+"), " "),
        normalizers.Strip(),
    ]
    tokenizer.normalizer = normalizers.Sequence([*steps, tokenizer.normalizer])
    end = slow.eos_token
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, slow.eos_token_id)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in slow.all_special_tokens])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=slow.pad_token,
        unk_token=slow.unk_token,
        model_max_length=slow.model_max_length,
        model_input_names=slow.model_input_names,
        padding_side=slow.padding_side,
        truncation_side=slow.truncation_side,
    )

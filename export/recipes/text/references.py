"""Answer questions by the rule of the pipeline that transformers had before release 5."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

LONGEST_ANSWER = 15  # tokens
WINDOW_STRIDE = 128  # the maximum number of tokens that two windows of a context share
SPANS = 12  # of a window that may be parts of the same words


class Answer(NamedTuple):
    text: str
    score: float
    start: int
    end: int


@torch.inference_mode()
def find_answer(
    network: Any, tokenizer: Any, question: str, context: str, max_length: int, align_to_words: bool = True
) -> Answer:
    """Return the answer, with the defaults of the pipeline."""
    settings = {"truncation": "only_second", "max_length": max_length, "stride": min(max_length // 2, WINDOW_STRIDE)}
    windows = tokenizer(question, context, return_overflowing_tokens=True, **settings)
    answers: dict[str, Answer] = {}
    for window, encoding in enumerate(windows.encodings):
        names = tokenizer.model_input_names
        outputs = network(**{name: torch.tensor([windows[name][window]]) for name in names if name in windows})
        in_context = torch.tensor([text == 1 for text in encoding.sequence_ids])
        competing = in_context | (torch.tensor(encoding.ids) == tokenizer.cls_token_id)
        starts, ends = (
            outputs[name][0].masked_fill(~competing, -10000.0).softmax(-1) * in_context
            for name in ("start_logits", "end_logits")
        )
        scores = starts.outer(ends).triu().tril(LONGEST_ANSWER - 1)
        for index in scores.ravel().argsort(descending=True)[: SPANS if align_to_words else 1].tolist():
            first, last = divmod(index, len(ends))
            if (score := float(scores[first, last])) > 0:
                start, end = characters(encoding, first, last, align_to_words)
                text = context[start:end].lower()  # spans that read the same share an answer
                same = answers.get(text, Answer(context[start:end], 0.0, start, end))
                answers[text] = same._replace(score=same.score + score)
    return max(answers.values(), key=lambda answer: answer.score, default=Answer("", 0.0, 0, 0))


def characters(encoding: Any, first: int, last: int, align_to_words: bool) -> tuple[int, int]:
    """Return the characters of these tokens, or of the words that they are in."""
    words = [encoding.token_to_word(token) for token in (first, last)]
    if align_to_words and None not in words:
        return encoding.word_to_chars(words[0], 1)[0], encoding.word_to_chars(words[1], 1)[1]
    return encoding.offsets[first][0], encoding.offsets[last][1]

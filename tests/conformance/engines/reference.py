"""Compute the answer that each engine must give, with a greedy loop over the model and processors of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

TOKENS = 14  # of a text, at most


class Reference:
    """The model in transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ends = self.model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]
        self.logprobs: list[torch.Tensor] = []  # of all tokens, at each step

    @torch.inference_mode()
    def tokens(self, prompt: str | list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        """Return the new tokens, with the one that ends the text."""
        ids = self.ids(prompt, options)
        stops = options.get("stop_token_ids", [])
        processors = transformers.LogitsProcessorList()
        if count := options.get("min_tokens"):
            minimum = transformers.MinNewTokensLengthLogitsProcessor(len(ids), count, [*self.ends, *stops], "cpu")
            processors.append(minimum)
        if bias := options.get("logit_bias"):
            values = {(token,): float(value) for token, value in bias.items()}
            processors.append(transformers.SequenceBiasLogitsProcessor(values))
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(float(options.get("repetition_penalty", 1))))
        ends = {*stops, *([] if options.get("ignore_eos") else self.ends)}
        new: list[int] = []
        self.logprobs = []
        while len(new) < TOKENS and not ends & {*new[-1:]}:
            tokens = torch.tensor([ids + new])
            logits = self.model(tokens).logits[:, -1]
            self.logprobs.append(logits[0].log_softmax(-1))
            scores = processors(tokens, logits.clone())[0]
            for token in {*new}:
                scores[token] -= options.get("presence_penalty", 0)
                scores[token] -= options.get("frequency_penalty", 0) * new.count(token)
            new.append(int(scores.argmax()))
        return new

    def ids(self, prompt: str | list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        """Return the tokens of a prompt or of a chat."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt).input_ids)
        variables = {"tools": options.get("tools")} | options.get("chat_template_kwargs", {})
        chat = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **variables)
        return list(chat)

    def answer(self, prompt: str | list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
        new = self.tokens(prompt, options)
        stopped = new[-1] in {*options.get("stop_token_ids", []), *([] if options.get("ignore_eos") else self.ends)}
        shown = new[: len(new) - stopped]
        count = options.get("logprobs", 0)
        return {
            "text": (prompt if isinstance(prompt, str) else "")
            + self.decode(shown, options.get("skip_special_tokens", True)),
            "finish_reason": "stop" if stopped else "length",
            "stop_reason": "",
            "num_input_tokens": len(self.ids(prompt, options)),
            "num_output_tokens": len(new),
            "logprobs": [
                self.entry(token, own) | {"top": [self.entry(id, own) for id in own.topk(count).indices.tolist()]}
                for token, own in zip(shown, self.logprobs, strict=False)
            ],
        }

    @torch.inference_mode()
    def prompt_logprobs(self, prompt: str, count: int) -> list[dict[str, Any]]:
        ids = self.tokenizer(prompt).input_ids
        scores = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        tops = [own.topk(count).indices.tolist() for own in scores]
        rows = zip(ids[1:], scores, tops, strict=True)
        first = {"id": ids[0], "token": self.tokenizer.decode([ids[0]]), "logprob": None, "top": []}
        return [
            first,
            *(self.entry(token, own) | {"top": [self.entry(id, own) for id in top]} for token, own, top in rows),
        ]

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(
            tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def entry(self, token: int, logprobs: torch.Tensor) -> dict[str, Any]:
        logprob = pytest.approx(logprobs[token].item(), abs=1e-3)
        entry = {"id": token, "token": self.tokenizer.decode([token]), "logprob": logprob}
        if "\ufffd" in entry["token"]:  # a part of a character
            byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
            entry["bytes"] = [byte_of[char] for char in self.tokenizer.convert_ids_to_tokens(token)]
        return entry

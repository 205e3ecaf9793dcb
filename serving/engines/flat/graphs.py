"""Replays recorded runs of text encoders on CUDA, where a small run takes longer to launch than to compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from serving.engines.flat.row import check_alike
from serving.engines.flat.run import CURRENT, FlatRun, NeedsPadding, Tensor, current
from serving.triton.types import Array

# The tokens of the recorded runs. Ladder tries no larger one after one that saves no time.
LADDER = tuple(2**power for power in range(6, 15))
# A graph has the same blocks at each replay: few for each text if texts are short, and few texts if they are long.
# FlashAttention computes so many tokens of a text in one block.
SHORT, SHORTEST, LONG_TEXTS = 128, 8, 32


def shapes(longest: int) -> list[tuple[int, int, int]]:
    """Return the tokens, the longest text and the most texts of the runs to record, of texts up to `longest`."""
    return [
        (tokens, min(tokens, longest, limit), tokens // SHORTEST if limit == SHORT else LONG_TEXTS)
        for tokens in LADDER
        for limit in dict.fromkeys((SHORT, tokens))
        if limit == SHORT or min(tokens, longest) > SHORT
    ]


def lengths_for(tokens: int, longest: int) -> list[int]:
    """Return the lengths of texts that fit into this run, but into no other run of as many tokens or fewer."""
    whole, rest = divmod(tokens * 3 // 4, longest)
    return [longest] * whole + [rest] * (rest > 0)


class RecordedRun:
    """A run of a fixed number of tokens. Texts that nobody reads fill what the current texts leave free."""

    def __init__(
        self, forward: Callable[..., Any], inputs: dict[str, Any], tokens: int, longest: int, texts: int
    ) -> None:
        row_shape = inputs["input_ids"].shape
        if any(isinstance(value, Tensor) and value.shape != row_shape for value in inputs.values()):
            raise NeedsPadding("its attention pads the texts")
        self.forward, self.tokens, self.texts = forward, tokens, texts
        # Former texts leave valid ids in these tensors, so that only new texts need to be copied.
        self.inputs = {
            name: value.new_zeros(1, tokens) if isinstance(value, Tensor) else value for name, value in inputs.items()
        }
        row = inputs["input_ids"].new_zeros(tokens)
        self.run = FlatRun((1, tokens), longest, row, row, row.new_zeros(texts + 1, dtype=torch.int32))
        self.ends = longest * torch.arange(1, texts + 1, dtype=torch.int32, device=row.device)

    def fits(self, run: FlatRun) -> bool:
        free = self.tokens - len(run.places)
        texts = len(run.starts) - 1 - (-free // self.run.longest)
        return free >= 0 and run.longest <= self.run.longest and texts <= self.texts

    def fill(self, inputs: dict[str, Any], run: FlatRun) -> None:
        """Copy these texts into the tensors that the recorded kernels read."""
        tokens, count = len(run.places), len(run.starts)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                self.inputs[name][:, :tokens] = value
        self.run.starts[:count] = run.starts
        self.run.starts[count:] = (self.ends[: self.texts + 1 - count] + tokens).clamp(max=self.tokens)

    def compute(self) -> Any:
        with current(self.run):
            return self.forward(**self.inputs)

    def record(self, pool: Any) -> Any:
        """Record the kernels of a run, in this pool of memory. Return the pool, which later recordings may share."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.compute()  # loads the kernels, which cannot be recorded
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = self.compute()

        def replay() -> Any:
            graph.replay()
            return outputs

        self.compute = replay  # type: ignore[method-assign]
        return graph.pool()


class Ladder:
    """The forward of a model that replays the smallest recorded run into which the texts fit, if any does."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.runs: list[RecordedRun] = []  # in ascending order
        self.pool: Any = None
        self.shape: tuple[int, int, int] | None = None  # of the run to record with the next texts

    def __call__(self, **inputs: Any) -> Any:
        """Return the outputs for the current texts. The next call overwrites them."""
        run = CURRENT.get()
        assert run
        if self.shape:
            recorded = RecordedRun(self.forward, inputs, *self.shape)
            self.shape = None
            recorded.fill(inputs, run)
            if run.places.is_cuda:
                self.pool = recorded.record(self.pool)
            self.runs.append(recorded)
        for recorded in self.runs:
            if recorded.fits(run):
                recorded.fill(inputs, run)
                outputs = recorded.compute()
                values = {
                    name: value[:, : len(run.places)] if value.shape[:2] == (1, recorded.tokens) else value
                    for name, value in outputs.items()
                    if isinstance(value, Tensor)
                }
                return type(outputs)(**values)
        return self.forward(**inputs)

    def climb(
        self,
        longest: int,
        run: Callable[[list[int]], list[Array]],
        fastest: Callable[[Callable[[], object]], float],
    ) -> str:
        """Record ever larger runs while they save time and the answers stay. Return how many, and why no more.

        `run` answers texts of these lengths, of up to `longest` tokens. `fastest` times a call.
        """
        reason = "no larger one was tried"
        for shape in shapes(longest):
            lengths, known = lengths_for(*shape[:2]), len(self.runs)
            try:
                expected, seconds = run(lengths), fastest(partial(run, lengths))
                self.shape = shape
                check_alike(expected, run(lengths))
                recorded = fastest(partial(run, lengths))
                if recorded < seconds:
                    continue
                reason = f"{shape[0]} tokens take {recorded * 1e3:.2f} ms with it and {seconds * 1e3:.2f} without"
            except Exception as error:
                reason = " ".join(str(error).split())
            self.shape = None
            del self.runs[known:]
            break
        tokens = max((recorded.tokens for recorded in self.runs), default=0)
        return f"replays {len(self.runs)} CUDA graphs for runs of up to {tokens} tokens ({reason})"

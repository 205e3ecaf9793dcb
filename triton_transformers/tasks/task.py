"""Define what one needs to know about a task: a row of the tables in this folder, which all other code reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from triton_transformers.protocol import TOKEN_COUNT

Axes = tuple[str | int, ...]

# The recipes and formats of systems on backend `pipeline`.
PIPELINE = "pipeline"
ONNX = ("onnx", "onnx-int8", "python")
INT8 = ("onnx", "int8", "onnx-int8", "python")

# The parameters of calls that several tasks have.
SAMPLING = (
    "do_sample early_stopping guidance_scale length_penalty max_length max_new_tokens min_length min_new_tokens min_p "
    "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences repetition_penalty temperature top_k top_p"
)
TOKENS = "add_special_tokens max_length padding truncation"
CHATS = f"{TOKENS} clean_up_tokenization_spaces continue_final_message max_new_tokens return_full_text stop_sequence"
LABELS, CANDIDATES = "function_to_apply top_k", "candidate_labels hypothesis_template"
# The parameter of a call whose object has the options of the generation.
OPTIONS = "generate_kwargs"
# Options with which few examples take little time, have answers, and have the same ones each time.
FEW_TOKENS = {"max_new_tokens": 8, "do_sample": False}
TEXT = "A dog sleeps on the sofa while it rains."


def unchanged(answer: Any) -> Any:
    return answer


@dataclass(frozen=True)
class Hub:
    """How a pipeline's request and answer differ from those of Hugging Face's Inference API."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: str = ""  # the pipeline's parameter with the options of the generation; they are its own if it is empty
    own: frozenset[str] | None = None  # the only parameters that are not options of the generation
    shape: Callable[[Any], Any] = unchanged  # of the answer to a row
    is_nested: bool = False  # the answer to one text is in a list, as those to several are
    is_flat: bool = False  # the answers to several texts are one list
    describes: bool = False  # the answer is the description of an image
    file: str = ""  # the field of the answer with a sound, which is the whole response


@dataclass(frozen=True)
class Encoder:
    """A text encoder's task, with a last step if the encoder's outputs are not yet the answer.

    Axes by letter: T tokens, L labels, D the width of a vector, M that of a token's vector, H that of the encoder's, V
    the vocabulary, K the requested answers, S the spans of a text, E its entities, or the words in its sparse vector.
    """

    model_class: str  # in transformers
    outputs: dict[str, Axes]  # of the encoder
    second_is_optional: bool = False
    truncation: str = "longest_first"  # which text of a pair is cut: a strategy of the library tokenizers
    # The tensors of the tokenizer that make the answers, together with the encoder's outputs.
    from_tokenizer: tuple[str, ...] = ()
    answers: dict[str, tuple[str, Axes]] = field(default_factory=dict)
    # The encoder itself makes the answers of its graph's outputs.
    encoder_answers: bool = False
    # The encoder is the whole system: an ensemble asks its steps for all outputs, whatever a client asks for.
    is_one_model: bool = False

    @property
    def has_last_step(self) -> bool:
        return bool(self.answers) and not self.encoder_answers

    @property
    def compared(self) -> list[str]:
        """Return the outputs that are compared: spans and words jump on a tie, so there those of the graph."""
        return list(self.answers if self.encoder_answers and not self.from_tokenizer else self.outputs)

    @property
    def cuts_windows(self) -> bool:
        """Return whether a second text that is too long becomes several rows of the encoder, instead of being cut."""
        return "pair" in self.from_tokenizer

    @property
    def ensemble_outputs(self) -> dict[str, tuple[str, Axes]]:
        """Return the outputs that clients get. Windows have no token count, because their rows are not the client's.

        Triton's response has the outputs of an ensemble in reverse order, and some clients read only the first, so the
        token count comes first.
        """
        answers = self.answers or {name: ("FP32", axes) for name, axes in self.outputs.items()}
        return answers if self.cuts_windows else {TOKEN_COUNT: ("INT32", (1,)), **answers}


@dataclass(frozen=True)
class Task:
    """A row: a task's words, its pipeline if transformers has one, and its tensors if another recipe is faster."""

    purpose: str  # as the end of a sentence about a system
    # Each field of a pipeline's row with its kind: text, json, chat, image, images, audio or video.
    fields: Mapping[str, str] = field(default_factory=dict)
    parameters: str = ""  # of a call. Transformers ignores some of those of another task
    # The parameters without which the pipeline cannot answer, with values for examples.
    required: Mapping[str, Any] = field(default_factory=dict)
    field_parameters: tuple[str, ...] = ()  # those that the pipeline takes beside its fields
    hub: Hub = field(default_factory=Hub)
    text_key: str = ""  # of the text that our own pipeline answers
    ability: str = ""  # of the pipeline: routes of the gateway are for it
    kind: str = ""  # of the faster recipe's systems, by their tensors (kinds.py)

    # Examples.
    example: str = TEXT  # of the first text
    quick: Mapping[str, Any] = field(default_factory=dict)  # parameters with which few examples take little time
    # The parameter with the options of a generation that would not end by itself; None if there is none.
    ends_by: str | None = None
    noun: str = ""  # of rows, unless the kind of their files has it
    files: int = 1  # in each row; 0 if a row may be without any
    is_random: bool = False  # only a seed makes answers comparable
    is_ascii: bool = False  # the model may have no tokens for other scripts
    drawing: str = "json"  # the function of page_answers.js that draws the answer

    # The recipe: `assemble` in export/recipes/<recipe>.py.
    recipe: str = PIPELINE
    formats: tuple[str, ...] = (PIPELINE,)  # the first that runs on the profile is the default
    neuron: bool = False  # PROFILE=neuron compiles the model, instead of making one of the formats
    # Increase it with each change of what the recipe makes: `make models` then assembles older systems again.
    version: str = "1"

    # The checkpoints.
    heads: tuple[str, ...] = ()  # the ends of the names of their architectures
    lists: tuple[
        str, ...
    ] = ()  # more lists of transformers, by the end of their names, of the pipeline's architectures
    types: tuple[str, ...] = ()  # the model types that were made for this task, and can do others
    rank: int = 0  # the lower, the likelier, if a checkpoint can do several

    # The tensors of the faster recipe's systems.
    inputs: Mapping[str, str] = field(
        default_factory=dict
    )  # each with an example; {mask} is the mask token of the model
    outputs: tuple[str, ...] = ()  # by which a system is known, unless its encoder has them
    encoder: Encoder | None = None
    # Whether `answers.agreement` compares no part of its answers: they have no vectors and no labels.
    is_incomparable: bool = False

    @property
    def is_faster_elsewhere(self) -> bool:
        """Return whether another recipe serves the task faster than the pipeline, where it can."""
        return bool(self.fields) and self.recipe != PIPELINE

    def fits(self, inputs: frozenset[str], outputs: frozenset[str]) -> bool:
        """Return whether a system with these tensors does the task."""
        own = {*self.encoder.ensemble_outputs} - {TOKEN_COUNT} if self.encoder else {*self.outputs}
        required = [*self.inputs][: 1 if self.encoder and self.encoder.second_is_optional else None]
        return bool(required) and {*required} <= inputs and own <= outputs

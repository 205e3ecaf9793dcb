"""The errors of our models, as Triton's error string carries them to programs that ask for this form.

Triton loses the status of an error in streams and between models, and its string has room for a sentence only. So a
request with the parameter ERROR_STATUS gets the error as one line of JSON; other clients get the sentence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from triton_transformers.triton_messages import own_message

# The parameter of a request that asks for typed errors.
ERROR_STATUS = "error_status"
# The codes that a program reads. Most errors need none.
CONTEXT_LENGTH, INVALID_VALUE = "context_length_exceeded", "invalid_value"
NO_CHAT_TEMPLATE, UNKNOWN_ADAPTER = "no_chat_template", "unknown_adapter"


@dataclass(frozen=True)
class TypedError:
    """An error of a model: its HTTP status, and what programs read of it."""

    status: int
    message: str  # a template of str.format, in which {0} stands for the first field
    code: str = ""
    fields: Sequence[str] = ()  # the inputs and options that the message names, the one at fault first
    index: int | None = None  # the row of the first field that is at fault

    @classmethod
    def from_sentence(
        cls, status: int, sentence: str, code: str = "", fields: Sequence[str] = (), index: int | None = None
    ) -> TypedError:
        message = sentence.replace("{", "{{").replace("}", "}}")
        for number, mention in enumerate(mentions(fields, index)):
            message = message.replace(mention, f"{{{number}}}")
        return cls(status, message, code, tuple(fields), index)

    @property
    def sentence(self) -> str:
        return self.message.format(*mentions(self.fields, self.index))

    def encode(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value not in ("", (), None)})


def mentions(fields: Sequence[str], index: int | None) -> list[str]:
    """Return how a sentence names each field."""
    names = [f"'{field}'" for field in fields]
    return names if index is None else [f"input {names[0]}: row {index}", *names[1:]]


def decode(text: str) -> TypedError | None:
    """Return the typed error in Triton's string, or None if it has another form: the error is Triton's own then."""
    try:
        return TypedError(**json.loads(own_message(text)))
    except (ValueError, TypeError):
        return None

"""Turns a chat into a prompt with the checkpoint's template, a program in Jinja's language, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shared.types import BadRequest

if TYPE_CHECKING:
    from jinja2 import Template

Message = dict[str, Any]  # with a role and a content

# A template comes with the weights, so it may be faulty, or written to fill the memory.
MAX_CHARACTERS = 4 * 2**20
MAX_REASON = 300
REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str | list[str]]) -> None:
        self.source = source  # empty if the checkpoint has none
        self.special_tokens = special_tokens  # bos_token, eos_token and so on, by these names

    def prompt(self, messages: list[Message]) -> str:
        """Return the prompt that the model's answer continues. Raise BadRequest if there is none."""
        if not self.source:
            raise BadRequest("this model has no chat template: send 'prompt' instead of 'messages'")
        return self.rendered("messages", messages, add_generation_prompt=True)

    def rendered(self, name: str, messages: list[Message], **variables: Any) -> str:
        """Return the text that the template makes of messages. Raise BadRequest that names this input if it fails."""
        pieces, length = [], 0
        try:
            for piece in self.template.generate(
                messages=[prepared(message) for message in messages],
                tools=None,
                documents=None,
                **self.special_tokens,
                **variables,
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise ValueError(f"the prompt has more than {MAX_CHARACTERS} characters")
            prompt = "".join(pieces)
            prompt.encode()  # JSON can escape half a character, which no tokenizer takes
        except ImportError:
            raise BadRequest("this server has no jinja2, which chat templates need: install it beside Triton") from None
        except Exception as error:  # a template raises anything, on purpose or not
            reason = f"{error or type(error).__name__}"[:MAX_REASON]
            raise BadRequest(f"input '{name}': the model's chat template fails: {reason}") from None
        return prompt

    @cached_property
    def template(self) -> Template:
        """Return the compiled template. It finds the names that transformers gives to templates."""
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.runtime import Macro
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class GenerationBlock(Extension):
            """The block {% generation %}, which marks the model's own texts for training: render its content."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Parser) -> nodes.Node:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("content"), [], [], body).set_lineno(line)

            def content(self, caller: Macro) -> str:
                return caller()

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.source)


def prepared(message: Message) -> Message:
    """Return a message as transformers passes it to a template: no key without a value, a reasoning under two names."""
    message = {name: value for name, value in message.items() if value is not None}
    for name in REASONING:
        if name in message:
            return {"thinking": message[name]} | message | {"reasoning_content": message[name]}
    return message


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

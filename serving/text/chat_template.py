"""Turns a chat into a prompt with the checkpoint's template, a program in Jinja's language, as transformers does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from serving.triton.types import BadRequest
from triton_transformers.errors import NO_CHAT_TEMPLATE

if TYPE_CHECKING:
    from jinja2 import Template

Message = dict[str, Any]  # with a role and a content
# The input with a chat instead of prompts, as one JSON list, and the one with its image files, in their order.
MESSAGES, IMAGES = "messages", "images"
# The names that transformers gives to the files with templates.
TEMPLATE, TOOL_TEMPLATE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"

# A template comes with the weights, so it may be faulty, or written to fill the memory.
MAX_CHARACTERS = 4 * 2**20
MAX_REASON = 300
REASONING = ("reasoning_content", "thinking", "reasoning")
# Names that a request's chat_template_kwargs must not have.
PROTECTED = ("messages", "tools", "documents", "add_generation_prompt")
# The templates of Phi-4 read the tools in a message.
MESSAGE_TOOLS = re.compile(r"message(\.tools\b|\[['\"]tools['\"]\])")


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str | list[str]], tool_source: str = "") -> None:
        self.source = source  # empty if the checkpoint has none
        self.special_tokens = special_tokens  # bos_token, eos_token and so on, by these names
        self.tool_use = ChatTemplate(tool_source, special_tokens) if tool_source else None  # used if there are tools

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> ChatTemplate:
        """Return the template of a tokenizer of transformers, which may have one more for tools."""
        own = tokenizer.chat_template or ""
        own = own if isinstance(own, dict) else {"default": own}
        return cls(own.get("default", ""), tokenizer.special_tokens_map, own.get("tool_use", ""))

    def prompt(
        self, messages: list[Message], tools: list[Any] | None = None, variables: Mapping[str, Any] | None = None
    ) -> str:
        """Return the prompt that the model's answer continues. Raise BadRequest if there is none."""
        if tools and self.tool_use:
            return self.tool_use.prompt(messages, tools, variables)
        if not self.source:
            raise BadRequest(
                "this model has no chat template: send 'prompt' instead of 'messages'", code=NO_CHAT_TEMPLATE
            )
        if tools and not re.search(r"\btools\b", self.source):
            raise BadRequest("option 'tools': this model's chat template has no place for tools", "tools")
        if wrong := [name for name in variables or () if name in PROTECTED]:
            raise BadRequest(
                f"option 'chat_template_kwargs' must not have '{wrong[0]}', which the request sets itself",
                "chat_template_kwargs",
            )
        if tools and MESSAGE_TOOLS.search(self.source):
            messages = with_tools(messages, tools)
        variables = {**(variables or {}), "tools": tools or None, "add_generation_prompt": True}
        return self.rendered("messages", messages, variables)

    def rendered(self, name: str, messages: list[Message], variables: Mapping[str, Any]) -> str:
        """Return the text that the template makes of messages. Raise BadRequest that names this input if it fails."""
        pieces, length = [], 0
        try:
            for piece in self.template.generate(
                {"tools": None, "documents": None, **self.special_tokens, **variables}
                | {"messages": [prepared(message) for message in messages]}
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
            raise BadRequest(f"input '{name}': the model's chat template fails: {reason}", name) from None
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


def with_tools(messages: list[Message], tools: list[Any]) -> list[Message]:
    """Return the messages as Phi-4's templates read them: the tools in that of the system, and calls as texts."""
    has_system = messages[0]["role"] == "system"
    system = (
        messages[0] if has_system else {"role": "system", "content": "You are a helpful assistant with some tools."}
    )
    system = system | {"tools": functions(tools)}
    return [
        system,
        *(
            message | {"content": f"<|tool_call|>{functions(message['tool_calls'])}<|/tool_call|>"}
            if message.get("tool_calls") and not message["content"]
            else message
            for message in messages[has_system:]
        ),
    ]


def functions(holders: list[Any]) -> str:
    return json.dumps([holder.get("function", holder) for holder in holders], ensure_ascii=False)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

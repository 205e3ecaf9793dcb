"""Chats become the prompts that transformers makes of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers

from export.catalogue import Job
from export.recipes.language import chat_templates
from export.recipes.language.recipe import assemble, read_sampling
from gateway.text import tool_calls
from serving.generation.decoding import Decoder
from serving.text import chat_template
from serving.text.chat_template import ChatTemplate
from serving.text.tokenizer import TextTokenizer
from serving.triton.types import BadRequest
from tests.support.chat_templates import TOOL_TEMPLATES, TOOLS_HERMES, TOOLS_LLAMA, TOOLS_MISTRAL
from tests.support.checkpoints import language

pytestmark = pytest.mark.usefixtures("one_thread")

# Templates with the constructs of well-known checkpoints.
LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
CHATML = """\
{%- if tools %}{{ raise_exception('no tools') }}{%- endif %}
{%- if messages[0].role != 'system' %}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}
{% for message in messages %}
{% if message.content is string %}
    {% set content = message.content %}
{% else %}
    {% set content = message.content | map(attribute='text') | join('\\n') %}
{% endif %}
{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""
MISTRAL = """\
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
JSON = """\
{{ bos_token }}{{ messages | tojson }}
{{ messages[0] | tojson(indent=2, sort_keys=true) }}{{ {"a": [1, none]} | tojson(separators=(",", ":")) }}
{% for message in messages %}
{% if message.role == 'system' %}{% continue %}{% endif %}
{% generation %}{% set last = message.content %}{{ last.split('\\n')[-1].strip() }}{% endgeneration %}
{% if loop.index > 4 %}{% break %}{% endif %}
{% endfor %}
{{ last is defined }}{{ messages[1].reasoning_content }}
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Which <b>weather</b>?",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
TEMPLATES = {"llama": LLAMA, "chatml": CHATML, "mistral": MISTRAL, "json": JSON}
QUESTION = [{"role": "user", "content": 'Which <b>battery</b> & torch fits? 비 그친 뒤 🥖\nOr "none" '}]
CHATS = [
    QUESTION,
    [*QUESTION, {"role": "assistant", "content": " The second one.  "}, {"role": "user", "content": ""}],
    [{"role": "system", "content": " Be brief."}, *QUESTION],
    [{"role": "user", "content": [{"type": "text", "text": "Which one?"}, {"type": "text", "text": "This?"}]}],
    [{"role": "user", "content": None}],
    [*QUESTION, {"role": "assistant", "content": "This.", "thinking": "The small one?"}, *QUESTION],
]


def checkpoint(folder: Path, template: str | dict[str, str] | None, save=language.save_llama) -> Path:
    save(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("weights") / "llama", CHATML)


def reference(tokenizer, chat: list[dict], **options: object):
    """Return what transformers makes of a chat, or None if the template refuses it."""
    try:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, **options)
    except Exception:
        return None


def answer(template: ChatTemplate, chat: list[dict]) -> str | None:
    try:
        return template.prompt(chat)
    except BadRequest as error:
        assert "chat template fails" in str(error)
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_equal_those_of_transformers(weights, name):
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    tokenizer.chat_template = TEMPLATES[name]
    template = ChatTemplate(TEMPLATES[name], tokenizer.special_tokens_map)
    expected = [reference(tokenizer, chat, tokenize=False) for chat in CHATS]
    assert len({text for text in expected if text}) > 1
    assert [answer(template, chat) for chat in CHATS] == expected


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_prompts_with_tools_equal_those_of_transformers(weights, name):
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    tokenizer.chat_template = TOOL_TEMPLATES[name]
    template = ChatTemplate(TOOL_TEMPLATES[name], tokenizer.special_tokens_map)
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    chat = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "name": "weather", "content": "sunny"},
    ]
    for messages, tools, variables in ((chat, TOOLS, {}), (QUESTION, None, {"enable_thinking": False, "name": 1})):
        expected = reference(tokenizer, messages, tokenize=False, tools=tools, **variables)
        assert template.prompt(messages, tools, variables) == expected
        assert expected


@pytest.mark.parametrize(
    ("template", "parameters"),
    [
        (TOOLS_HERMES, {"tool_parser": "hermes", "reasoning": "think"}),
        (TOOLS_LLAMA, {"tool_parser": "llama3"}),
        (TOOLS_MISTRAL, {"tool_parser": "mistral"}),
        (TOOLS_MISTRAL + "[ARGS]", {"tool_parser": "mistral_args"}),
        ("{{ tools }}<tool_call>\n<function=name>", {"tool_parser": "qwen3_coder"}),
        ("{{ tools }}<|channel|>", {"tool_parser": "harmony", "reasoning": "harmony"}),
        ("{{ message['tools'] }}<|tool|>", {"tool_parser": "phi"}),
        ({"default": "", "tool_use": "{{ tools }}<|tool_call|>"}, {"tool_parser": "granite"}),
        ("<think></think>{{ '<think>\n' }}", {"reasoning": "think_opened"}),
        ("{{ raise_exception('no') }}</think>", {"reasoning": "think"}),
        ("{{ tools }}", {}),  # in a form that is unknown
        (TOOLS_MISTRAL.replace("tools", "others"), {}),
        (None, {}),
    ],
)
def test_form_of_calls_and_reasoning_is_found(weights, template, parameters):
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    tokenizer.chat_template = template
    assert chat_templates.chat_parameters(tokenizer) == parameters


@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        ({}, {}),
        ({"temperature": 0.6}, {}),  # transformers would not sample
        ({"do_sample": True, "temperature": 1}, {"temperature": 1}),
        ({"do_sample": True, "top_k": 64}, {"temperature": 1.0, "top_k": 64}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repetition_penalty": 1.0}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"do_sample": True, "temperature": 9.5, "top_p": None, "top_k": 0, "min_p": "a", "eos_token_id": 2}, {}),
    ],
)
def test_sampling_of_the_checkpoint_is_read(settings, sampling):
    assert read_sampling(settings) == sampling


@pytest.mark.parametrize(
    ("template", "summary"),
    [
        (None, "no chat template, so chats are refused"),
        ("{{ messages }}", "chats without tools or reasoning"),
        ("{{ tools }}<tool_call></think>", "chats with tools (hermes) and reasoning (think)"),
    ],
)
def test_summary_names_what_chats_can_have(weights, template, summary):
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    tokenizer.chat_template = template
    assert chat_templates.chat_summary(tokenizer) == summary


def test_gateway_knows_every_form():
    assert {*chat_templates.FAMILIES.values()} <= tool_calls.FAMILIES.keys()
    assert {*chat_templates.REASONING.values()} <= {tool_calls.HARMONY, *tool_calls.REASONING}


def test_phi_reads_the_tools_in_the_message_of_the_system():
    source = (
        "{% for message in messages %}{{ message['role'] + message['content'] + (message['tools'] or '') }}{% endfor %}"
    )
    functions = json.dumps([TOOLS[0]["function"]], ensure_ascii=False)
    assert (
        ChatTemplate(source, {}).prompt([{"role": "system", "content": "Brief."}], TOOLS) == f"systemBrief.{functions}"
    )
    assert f"tools.{functions}user" in ChatTemplate(source, {}).prompt(QUESTION, TOOLS)
    call = {"function": {"name": "weather", "arguments": {}}}
    prompt = ChatTemplate(source, {}).prompt([{"role": "assistant", "content": "", "tool_calls": [call]}], TOOLS)
    assert prompt.endswith('assistant<|tool_call|>[{"name": "weather", "arguments": {}}]<|/tool_call|>')


@pytest.mark.parametrize(
    ("tools", "variables", "reason"),
    [
        (TOOLS, {}, "option 'tools': this model's chat template has no place for tools"),
        (None, {"messages": []}, "option 'chat_template_kwargs' must not have 'messages'"),
        (None, {"add_generation_prompt": False}, "must not have 'add_generation_prompt'"),
    ],
)
def test_wrong_variables_are_refused(tools, variables, reason):
    with pytest.raises(BadRequest, match=reason):
        ChatTemplate(MISTRAL, {}).prompt(QUESTION, tools, variables)


def loaded(folder: Path, form: str) -> TextTokenizer | Decoder:
    if form != "python":
        return TextTokenizer(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return Decoder(model, transformers.AutoTokenizer.from_pretrained(folder))


def set_in_tokenizer_config(folder: Path, template: object) -> None:
    """Write the template as older releases of transformers do."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


@pytest.mark.parametrize("form", ["vllm", "python"])
@pytest.mark.parametrize(
    "template",
    [
        MISTRAL,
        [
            {"name": "tool_use", "template": "{{ tools }}{{ messages[0].content }}"},
            {"name": "default", "template": MISTRAL},
        ],
    ],
)
def test_templates_in_tokenizer_config_are_found(tmp_path, form, template):
    folder = language.save_llama(tmp_path / "weights")
    set_in_tokenizer_config(folder, template)
    assemble(Job("mine", "text-generation", form, folder, False, tmp_path))
    found = loaded(tmp_path / "mine/1", form).chat_template
    assert found.prompt(QUESTION) == f"<s>[INST] {QUESTION[0]['content']} [/INST]"
    if isinstance(template, list):
        assert found.prompt(QUESTION, TOOLS).endswith(str(TOOLS) + QUESTION[0]["content"])


@pytest.mark.parametrize("template", [None, [{"name": "tool_use", "template": CHATML}]])
@pytest.mark.parametrize("form", ["vllm", "python"])
def test_model_without_a_template_refuses_messages(tmp_path, form, template):
    folder = language.save_llama(tmp_path / "weights")
    if template:
        set_in_tokenizer_config(folder, template)
    assemble(Job("mine", "text-generation", form, folder, False, tmp_path))
    with pytest.raises(BadRequest, match="this model has no chat template: send 'prompt' instead of 'messages'"):
        loaded(tmp_path / "mine/1", form).chat_template.prompt(QUESTION)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (MISTRAL, "Conversation roles must alternate user/assistant/user/assistant/...$"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[9].content }}", "list object has no element 9"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{% for i in range(99999) %}{{ '%s' | format(messages) * 9 }}{% endfor %}", "more than 4194304 characters"),
        ("{{ raise_exception('x' * 1000) }}", "x{300}$"),
    ],
)
def test_fault_of_a_template_is_a_wrong_request(source, reason):
    chat = [{"role": "assistant", "content": "Which one?"}]
    with pytest.raises(BadRequest, match=f"input 'messages': the model's chat template fails: .*{reason}"):
        ChatTemplate(source, {}).prompt(chat)


def test_server_without_jinja_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(BadRequest, match="this server has no jinja2"):
        ChatTemplate(CHATML, {}).prompt(QUESTION)


def test_template_knows_the_date(monkeypatch):
    class Then(chat_template.datetime):
        @classmethod
        def now(cls, *_):
            return cls(2026, 7, 4)

    monkeypatch.setattr(chat_template, "datetime", Then)
    prompt = ChatTemplate(LLAMA, {"bos_token": "<s>"}).prompt(QUESTION)
    assert "Today Date: 04 Jul 2026" in prompt

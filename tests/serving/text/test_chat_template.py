"""Chats become the prompts that transformers makes of them, on every engine."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
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
from tests.support.python_backend import InferenceRequest, InferenceResponse, instance_args, parameters
from triton_transformers.tensors import Tensor

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


@pytest.mark.slow
@pytest.mark.parametrize("form", ["vllm", "openvino-fp32", "python"])
@pytest.mark.parametrize("name", ["mistral", "chatml"])
def test_assembled_model_reads_the_tokens_of_transformers(tmp_path, form, name):
    """Add no second token that begins a text: the template of Mistral writes it, that of ChatML does not."""
    folder = checkpoint(tmp_path / "weights", TEMPLATES[name])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assemble(Job("mine", "text-generation", form, folder, False, tmp_path))
    model = loaded(tmp_path / "mine/1", form)
    for chat in CHATS[:2]:
        tokens = model.encode(model.chat_template.prompt(chat), special_tokens=False)
        assert tokens == reference(tokenizer, chat)
        assert tokens.count(tokenizer.bos_token_id) == (name == "mistral")


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


# --- requests ---------------------------------------------------------------------------------------------------------

OUTPUTS = ["text", "text_output", "finish_reason", "num_input_tokens", "num_output_tokens", "stop_reason"]


@pytest.fixture(scope="module")
def serve(pb_utils, weights, tmp_path_factory):
    """Return a function that sends a request to a tiny Llama, with transformers or OpenVINO, streaming or not."""
    models = {}

    def send(form: str, streams: bool = False, outputs: list[str] = OUTPUTS, **inputs) -> list[InferenceResponse]:
        repository = tmp_path_factory.getbasetemp() / form
        if not repository.exists():
            repository.mkdir()
            assemble(Job("mine", "text-generation", form, weights, False, repository))
        if (form, streams) not in models:
            models[form, streams] = start(repository / "mine", form, streams)
        request = InferenceRequest(outputs, inputs.pop("parameters", None), **inputs)
        models[form, streams].execute([request])
        assert request.sender.finished.wait(60)
        return request.sender.responses

    yield send
    for model in models.values():
        model.finalize()


def start(model: Path, form: str, streams: bool):
    config = {"model_transaction_policy": {"decoupled": streams}, **parameters(cache_gigabytes=1, max_new_tokens=3)}
    module, name = ("batched", "BatchedGeneration") if form == "python" else GENAI
    backend = getattr(importlib.import_module(f"serving.generation.{module}"), name)()
    backend.initialize(instance_args(model, config))
    return backend


GENAI = ("openvino.engine", "GenAIGeneration")
FORMS = ("python", "openvino-fp32")


def message_input(chat: list[dict]) -> list[bytes]:
    return [json.dumps(chat).encode()]


def greedy(weights: Path, tokens: list[int], new_tokens: int) -> list[int]:
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(weights)
    output = model.generate(torch.tensor([tokens]), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return output[0, len(tokens) :].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_chat_is_answered_as_transformers_does(serve, weights, form):
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    tokens = reference(tokenizer, QUESTION)
    expected = greedy(weights, tokens, 12)
    options = {"messages": message_input(QUESTION), "parameters": {"max_tokens": 12}}
    (response,) = serve(form, **options)
    text = tokenizer.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert response.outputs == {"text": [text.encode()]}
    (response,) = serve(form, outputs=OUTPUTS[1:], **options)
    assert response.outputs == {
        "text_output": [text.encode()],
        "finish_reason": [b"length"],
        "num_input_tokens": [len(tokens)],
        "num_output_tokens": [12],
        "stop_reason": [b""],
    }


@pytest.mark.parametrize("form", FORMS)
def test_streamed_pieces_add_up_to_the_answer(serve, form):
    options = {"messages": message_input(QUESTION), "parameters": {"max_tokens": 12}, "outputs": ["text", *OUTPUTS[2:]]}
    (whole,) = serve(form, **options)
    pieces = serve(form, streams=True, **options)
    assert len(pieces) > 2
    assert b"".join(piece.outputs["text"][0] for piece in pieces) == whole.outputs["text"][0]
    assert sum(piece.outputs["num_output_tokens"][0] for piece in pieces) == 12
    assert {piece.outputs["num_input_tokens"][0] for piece in pieces} == {whole.outputs["num_input_tokens"][0]}
    assert [piece.outputs["finish_reason"][0] for piece in pieces] == [b""] * (len(pieces) - 1) + [b"length"]


@pytest.mark.parametrize("form", FORMS)
def test_finish_reason_is_stop_for_a_stop_string(serve, form):
    options = {"prompt": [b"I am going", b"It"], "outputs": ["text", *OUTPUTS[2:]]}
    parameters = {"max_tokens": 12, "exclude_input_in_output": True}
    (whole,) = serve(form, parameters=parameters, **options)
    stop = whole.outputs["text"][0].decode()[2:4]
    (stopped,) = serve(form, parameters=parameters | {"stop": stop}, **options)
    assert (stopped.outputs["finish_reason"][0], stopped.outputs["stop_reason"][0]) == (b"stop", stop.encode())
    assert 0 < stopped.outputs["num_output_tokens"][0] < 12
    assert whole.outputs["finish_reason"] == [b"length"] * 2
    assert whole.outputs["stop_reason"] == [b""] * 2
    assert whole.outputs["num_output_tokens"] == [12, 12]
    first, second = whole.outputs["num_input_tokens"]
    assert first > second > 0


def test_chat_without_a_limit_may_fill_the_context(serve):
    """The parameter max_new_tokens limits only prompts."""
    (response,) = serve("python", messages=message_input(QUESTION), outputs=OUTPUTS[2:])
    tokens = response.outputs["num_input_tokens"][0] + response.outputs["num_output_tokens"][0]
    assert tokens == language.CONTEXT or response.outputs["finish_reason"] == [b"stop"]
    (response,) = serve("python", prompt=[b"It"], outputs=OUTPUTS[2:])
    assert response.outputs["num_output_tokens"][0] <= 3


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"messages": [b"[]"]}, "input 'messages' must be one JSON list of messages"),
        ({"messages": [b'{"role": "user", "content": "a"}']}, "input 'messages' must be one JSON list"),
        ({"messages": [b'["a"]']}, "input 'messages' must be one JSON list"),
        ({"messages": [b'[{"role": "user"}]']}, "input 'messages' must be one JSON list"),
        ({"messages": [b'[{"role": 1, "content": "a"}]']}, "input 'messages' must be one JSON list"),
        ({"messages": [b"\xff"]}, "input 'messages' must be one JSON list"),
        ({"messages": [b"[" * 100_000]}, "input 'messages' must be one JSON list"),
        ({"messages": message_input(QUESTION) * 2}, "input 'messages' must be one JSON list"),
        ({"messages": message_input([{"role": "user", "content": 1}])}, "input 'messages': the model's chat template"),
        ({"messages": message_input(QUESTION * 20)}, "input 'messages' has "),
        ({"messages": message_input([{"role": "user", "content": "\ud83e"}])}, "input 'messages': the model's chat"),
        (
            {"messages": message_input(QUESTION), "exclude_input_in_output": [False]},
            "option 'exclude_input_in_output' must be true: the answer to 'messages' has no prompt",
        ),
    ],
)
def test_wrong_chat_is_refused(serve, inputs, reason):
    (response,) = serve("python", **inputs)
    code, message = response.error
    assert code == "INVALID_ARG"
    assert message.startswith(reason)
    assert "battery" not in message.replace("Which battery fits?", "")


def continued(serve, streams: bool, parameters: dict | None = None, **inputs) -> list[InferenceResponse]:
    return serve("python", streams, OUTPUTS[:2], parameters={"max_tokens": 12} | (parameters or {}), **inputs)


def joined(responses: list[InferenceResponse], output: str) -> str:
    assert all(list(response.outputs) == [output] for response in responses)
    return b"".join(response.outputs[output][0] for response in responses).decode()


def test_text_is_the_same_under_both_names_and_in_pieces(serve):
    (answer,) = continued(serve, False, prompt=[b"I am going"])
    text = joined([answer], "text")
    assert text.startswith("I am going")
    assert joined(continued(serve, False, text_input=[b"I am going"]), "text_output") == text
    streamed = continued(serve, True, prompt=[b"I am going"])
    assert len(streamed) > 2
    assert joined(streamed, "text") == text


def test_stream_of_vllm_begins_after_the_prompt(serve):
    text = joined(continued(serve, False, prompt=[b"I am going"]), "text")
    continuation = joined(
        continued(serve, False, text_input=[b"I am going"], exclude_input_in_output=[True]), "text_output"
    )
    assert "I am going" + continuation == text
    for extra in ({"parameters": {"stream": True}}, {"stream": [True]}):
        assert joined(continued(serve, True, text_input=[b"I am going"], **extra), "text_output") == continuation
    whole = continued(serve, True, text_input=[b"I am going"], stream=[True], exclude_input_in_output=[False])
    assert joined(whole, "text_output") == text


def test_streaming_model_answers_once_without_stream(serve):
    (answer,) = continued(serve, True, {"stream": False}, text_input=[b"I am going", b"It"])
    first, second = answer.outputs["text_output"]
    assert first.startswith(b"I am going") and second.startswith(b"It")


@pytest.mark.parametrize(
    ("streams", "inputs", "reason"),
    [
        (False, {"text_input": [b"I am"], "stream": [True]}, "option 'stream' is true, but this model answers once"),
        (True, {"text_input": [b"I am", b"It"]}, "input 'text_input' holds 2 prompts; streaming takes one per request"),
        (False, {"text_input": [b"a 1 " * 300]}, r"input 'text_input' has \d+ tokens; in the model's context"),
    ],
)
def test_wrong_request_gets_one_error(serve, streams, inputs, reason):
    (answer,) = continued(serve, streams, **inputs)
    code, message = answer.error
    assert code == "INVALID_ARG"
    assert message.startswith(reason.split(r"\d+")[0])


# --- token ids --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_token_ids_are_continued_as_their_text(serve, weights, form):
    ids = transformers.AutoTokenizer.from_pretrained(weights)("I am going").input_ids
    row = Tensor.from_texts("prompt", [ids]).data[4:]
    (of_text,) = serve(form, text_input=[b"I am going"], outputs=OUTPUTS[1:])
    (of_ids,) = serve(form, text_input=np.array([row], np.object_), outputs=OUTPUTS[1:])
    assert of_ids.outputs == of_text.outputs


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_tokenized_has_ids_of_texts_and_chats_and_the_text_of_ids(serve, weights, form, streams):
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)

    def tokenized(**inputs) -> list[dict]:
        (response,) = serve(form, streams, ["tokenized"], **inputs)
        return [json.loads(row) for row in response.outputs["tokenized"]]

    ids = tokenizer("I am going").input_ids
    plain = tokenizer("I am going", add_special_tokens=False).input_ids
    (row,) = tokenized(text_input=[b"I am going"])
    before, after = row["special"]
    assert (row["ids"], ids[before : len(ids) - after]) == (ids, plain)
    chat = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    of_chat = tokenizer(chat, add_special_tokens=False).input_ids
    assert tokenized(messages=message_input(QUESTION))[0]["ids"] == of_chat
    sent = Tensor.from_texts("prompt", [ids]).data[4:]
    expected = {"text": tokenizer.decode(ids), "plain_text": tokenizer.decode(ids, skip_special_tokens=True)}
    assert tokenized(text_input=np.array([sent], np.object_)) == [expected]


def test_unknown_token_id_is_refused(serve):
    rows = [b"I am going", Tensor.from_texts("prompt", [[10**6]]).data[4:]]
    for outputs in (OUTPUTS, ["tokenized"]):
        (response,) = serve("python", outputs=outputs, text_input=np.array(rows, np.object_))
        assert "row 1 has the token id 1000000; this model's ids are 0 to" in response.error[1]

"""Adapters on the real server: each text is that of the model whose weights its adapter is merged into."""

from __future__ import annotations

import json
import threading
import urllib.request
from functools import cache
from pathlib import Path
from urllib.error import HTTPError

import pytest
import transformers

from tests.support.checkpoints import language
from tests.support.checkpoints.lora import merged, save_adapter
from tests.support.generation import PROMPTS, send_concurrently
from tests.support.hub_stand_in import Published, hub_stand_in
from tests.support.stacks import TestStack
from triton_transformers.http import opener

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SYSTEM = "dialects"
TOKENS = 12
# Each client rests between two requests: most of the machine's time is for the commands beside them.
PAUSE_S = 0.1
# "" is the model without an adapter.
ADAPTERS = {
    "tone": {"layers": "q_proj|v_proj"},
    "legal": {"layers": "[a-z_]+_proj", "seed": 2, "use_rslora": True, "rank_pattern": {"o_proj": 2}},
    "more": {"layers": "down_proj", "seed": 3, "alpha_pattern": {"layers.0.mlp.down_proj": 16}},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return language.save_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(folder / name, base, **options) for name, options in ADAPTERS.items()}


@pytest.fixture(scope="module")
def expected(base, saved):
    """Return a function that continues a prompt with an adapter, as transformers does with the merged weights."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = cache(lambda adapter: merged(base, saved.get(adapter)))

    @cache
    def text(adapter: str, prompt: str) -> str:
        tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        whole = model(adapter).generate(**tokens, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)[0]
        return tokenizer.decode(whole[tokens.input_ids.shape[1] :], skip_special_tokens=True)

    assert len({text(adapter, PROMPTS[0]) for adapter in ("", *ADAPTERS)}) == 1 + len(ADAPTERS)
    return text


@pytest.fixture(scope="module")
def assembled(stack, base, saved) -> TestStack:
    with hub_stand_in({"tests/legal": Published(saved["legal"])}) as hub:
        stack.assemble({"SYSTEMS": SYSTEM, "SOURCE": base, "TASK": "text-generation", "FORMAT": "openvino-fp32"})
        adapters = f"tone={saved['tone']} replaced={saved['tone']} legal=tests/legal"
        done = stack.make("models", SYSTEMS=SYSTEM, ADAPTERS=adapters, HF_ENDPOINT=hub.url)
        assert done.returncode == 0, done.stdout + done.stderr
    return stack


@pytest.fixture(scope="module", params=["openvino-fp32", "python"])
def served(assembled, base, request) -> TestStack:
    """Serve the system with its adapters on one engine, then on the other."""
    assembled.assemble({"SYSTEMS": SYSTEM, "SOURCE": base, "TASK": "text-generation", "FORMAT": request.param})
    assembled.serve(SYSTEM)
    assembled.wait(lambda: f"{SYSTEM}:legal" in models(assembled), "the adapters")
    return assembled


def complete(stack: TestStack, model: str, prompt: str) -> str:
    answer = stack.post("/v1/completions", model=model, prompt=prompt, max_tokens=TOKENS, temperature=0)
    return answer["choices"][0]["text"]


def named(adapter: str) -> str:
    return f"{SYSTEM}:{adapter}" if adapter else SYSTEM


def models(stack: TestStack) -> set[str]:
    request = urllib.request.Request(f"{stack.gateway}/v1/models")
    request.add_header("Authorization", f"Bearer {stack.client_key}")
    return {model["id"] for model in json.load(opener.open(request))["data"]}


def test_texts_of_adapters_are_those_of_merged_weights_alone_and_mixed(served, expected):
    asked = [(adapter, prompt) for prompt in PROMPTS for adapter in ("", "tone", "legal")]
    for adapter, prompt in asked[:6]:
        assert complete(served, named(adapter), prompt) == expected(adapter, prompt)
    # The prompts before are in the prefix cache now, each with the keys and values of its own adapter.
    together = send_concurrently(len(asked), lambda number: complete(served, named(asked[number][0]), asked[number][1]))
    assert together == [expected(*one) for one in asked]


@pytest.mark.parametrize("served", ["openvino-fp32"], indirect=True)
def test_option_that_openvino_lacks_with_adapters_is_refused(served):
    with pytest.raises(HTTPError) as refusal:
        served.post("/v1/completions", model="dialects:tone", prompt="a", repetition_penalty=1.5)
    message = "'repetition_penalty': OpenVINO GenAI does not have it together with an adapter"
    assert refusal.value.code == 400 and message in json.load(refusal.value)["error"]["message"]


@pytest.mark.parametrize("served", ["openvino-fp32", pytest.param("python", marks=pytest.mark.slowest)], indirect=True)
def test_adapters_come_and_go_while_the_system_answers(served, saved, expected):
    stop, wrong, answers = threading.Event(), [], []

    def ask(adapter: str) -> None:
        while not stop.wait(PAUSE_S):
            try:
                answers.append(text := complete(served, named(adapter), PROMPTS[0]))
                if text != expected(adapter, PROMPTS[0]):
                    wrong.append(text)
            except Exception as error:
                wrong.append(error)

    clients = [threading.Thread(target=ask, args=(adapter,)) for adapter in ("", "legal")]
    for client in clients:
        client.start()
    try:
        added = served.make("add", SYSTEM=SYSTEM, ADAPTERS=f"more={saved['more']} replaced={saved['more']}")
        assert added.returncode == 0, added.stdout + added.stderr
        served.wait(lambda: f"{SYSTEM}:more" in models(served), "the new adapter")
        for adapter in ("more", "replaced"):
            assert complete(served, f"{SYSTEM}:{adapter}", PROMPTS[1]) == expected("more", PROMPTS[1])
        removed = served.make("remove", SYSTEM=f"{SYSTEM}:more")
        assert removed.returncode == 0, removed.stdout + removed.stderr
        served.wait(lambda: f"{SYSTEM}:more" not in models(served), "the end of the adapter")
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert answers and not wrong
    with pytest.raises(HTTPError) as refusal:
        complete(served, f"{SYSTEM}:more", PROMPTS[0])
    assert refusal.value.code == 404
    assert json.load(refusal.value)["error"]["code"] == "model_not_found"
    assert {f"{SYSTEM}:tone", f"{SYSTEM}:legal"} <= models(served)


def test_removal_deletes_the_system_with_its_adapters(assembled):
    assembled.make("remove", SYSTEM=SYSTEM)
    assert not (assembled.folder / "models" / SYSTEM).exists()

"""The gateway's page in a real browser: Chromium with its driver, which tests/chromium.sh installs."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from gateway.edge.config import Config, Limits
from tests.support import page_systems
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.page_systems import HOSTILE, NAMES, PIECES, PrometheusStandIn
from tests.support.served_pipelines import assemble_pipelines
from tests.support.stacks import own_ports
from tests.support.triton_stand_in import GENERATION_INPUTS, Model, TritonStandIn, generator
from triton_transformers.settings import Settings
from triton_transformers.tasks.media import wav
from triton_transformers.tensors import Tensor

WAIT_S = 120
KEY = "a-key-of-the-tests"
NARROW, WIDE = 400, 1280
ASR = "automatic-speech-recognition"


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if not all(programs) and os.environ.get("CI") != "true":
        pytest.skip("Chromium or its driver is missing: CI=true tests/chromium.sh installs them")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"):
        options.add_argument(argument)
    # The microphone is one of Chromium's own, which beeps.
    options.add_argument("--use-fake-device-for-media-stream")
    options.add_argument("--use-fake-ui-for-media-stream")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(programs[1]))
    driver.set_script_timeout(WAIT_S)
    try:
        yield driver
    finally:
        driver.quit()


def png_of(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


class Page:
    """The page in the browser."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        self.url = url
        self.open()

    def open(self) -> None:
        self.browser.get(self.url)

    def form(self, system: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, f"[data-system={system}] form")

    def field(self, system: str, name: str) -> WebElement:
        """Return a field, and open the options if it is one."""
        script = (
            "document.querySelectorAll(`[data-system=${arguments[0]}] form details`).forEach((all) => all.open = true)"
        )
        self.browser.execute_script(script, system)
        return self.form(system).find_element(By.NAME, name)

    def continue_text(self, system: str) -> None:
        """Let the box of a model that chats continue a text instead."""
        self.field(system, "mode")
        self.press(system, "[value=text]")

    def fill(self, system: str, **fields: str) -> None:
        for name, text in fields.items():
            field = self.field(system, name)
            field.clear()
            field.send_keys(text)

    def press(self, system: str, button: str = "[type=submit]") -> None:
        self.form(system).find_element(By.CSS_SELECTOR, button).click()

    def answer(self, system: str) -> WebElement:
        return self.form(system).find_element(By.CSS_SELECTOR, ".answer")

    def text(self, system: str) -> str:
        return self.answer(system).text

    def send(self, system: str, **fields: str) -> str:
        """Fill in the fields, send them, and return the answer."""
        self.fill(system, **fields)
        self.press(system)
        self.wait(lambda: self.text(system) and not self.answer(system).get_attribute("aria-busy"))
        return self.text(system)

    def wait_for_generated(self, system: str, text: str) -> None:
        self.wait(lambda: [node.text for node in self.answer(system).find_elements(By.CLASS_NAME, "text")] == [text])

    def wait(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.browser, WAIT_S, 0.05).until(lambda _: condition())

    def run(self, script: str) -> Any:
        return self.browser.execute_script(script)

    def log(self) -> list[str]:
        """Return what the browser logged since the last call: errors, and violations of the policy."""
        return [entry["message"] for entry in self.browser.get_log("browser")]


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    with page_systems.patience():
        yield


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonStandIn]:
    with TritonStandIn(*page_systems.models()) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def prometheus() -> Iterator[PrometheusStandIn]:
    with PrometheusStandIn() as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def config(triton: TritonStandIn) -> Config:
    return Config(triton=triton.address, systems=NAMES, limits=Limits(body=30_000))


@pytest.fixture(scope="module")
def gateway(
    config: Config, prometheus: PrometheusStandIn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    own = own_ports() | {"PROMETHEUS_PORT": str(prometheus.port), "REPORTS": str(tmp_path_factory.mktemp("reports"))}
    with running_gateway(config, Settings.load().replace(**own)) as running:
        yield running


@pytest.fixture
def page(chromium: webdriver.Chrome, gateway: RunningGateway) -> Iterator[Page]:
    """Open the page. At the end, the browser may have logged nothing, and no text may have become an element."""
    page = Page(chromium, gateway.url)
    page.log()
    yield page
    assert page.log() == []
    assert page.run("return document.querySelectorAll('.answer img').length") == 0
    assert page.run("return document.title") == "12 of 13 systems are ready"


@pytest.fixture
def show(page: Page, triton: TritonStandIn, config: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Return a function that opens the page of a gateway with other systems, which Triton gets, or other settings.

    The page is left before its server ends, because the browser would log that.
    """
    with contextlib.ExitStack() as gateways:

        def open_page(*models: Model, **changes: Any) -> None:
            monkeypatch.setattr(triton, "models", triton.models | {model.name: model for model in models})
            systems = {"systems": tuple(model.name for model in models)} if models else {}
            running = gateways.enter_context(running_gateway(replace(config, **systems | changes)))
            page.browser.get(running.url.replace("://", f"://anybody:{KEY}@"))

        yield open_page
        page.open()


def commands(page: Page, system: str) -> list[str]:
    """Return the commands of the system: for curl, and in Python."""
    script = "return [...document.querySelectorAll(`[data-system=${arguments[0]}] pre`)].map((pre) => pre.textContent)"
    return page.browser.execute_script(script, system)


@pytest.mark.slow
def test_reading_part_needs_no_javascript(chromium: webdriver.Chrome, gateway: RunningGateway) -> None:
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chromium.get(gateway.url)
        text = chromium.find_element(By.TAG_NAME, "main").text
        forms = chromium.find_elements(By.TAG_NAME, "form")
        assert forms and not any(form.is_displayed() for form in forms)
        chromium.find_element(By.TAG_NAME, "summary").click()
        command = chromium.find_element(By.TAG_NAME, "pre")
        assert command.is_displayed() and command.text.startswith(f"curl {gateway.url}/v1/embeddings")
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "The boxes to try a system need JavaScript" in text
    for part in (*NAMES, "12 of 13 systems are ready", "13.1 ms", "packed_onnx, openvino bf16", "dynamic, up to 64"):
        assert part in text


# System, its fields, and what its answer shows.
BOXES = [
    ("classifier", {"input": "a good film\na bad one"}, ["a good film → positive", "0.750", "a bad one → negative"]),
    ("names", {"input_text": "Marie Curie was born in Warsaw."}, ["Marie Curie PER 0.998 was", f"Warsaw {HOSTILE}"]),
    ("answers", {"question": "Where?"}, ["born in Warsaw. In", "score 0.930"]),
    ("mask", {}, ["capital", "0.900", HOSTILE]),
    ("sparse", {}, ["password", "2.500", "reset"]),
    ("embedding", {"query": "aaa", "texts": "zzzzzz zz\n\naaa\nab"}, []),
    ("reranker", {"query": "blue sky", "texts": "a dog\na blue sky\nblue"}, []),
]


@pytest.mark.slow
def test_boxes_show_answers_as_text_and_the_best_first(page: Page) -> None:
    for system, fields, expected in BOXES:
        text = page.send(system, **fields)
        assert all(part in text for part in expected), text
    assert page.text("embedding").splitlines()[:2] == ["aaa", "1.000"]
    assert page.text("reranker").splitlines()[:6] == ["a blue sky", "1.000", "blue", "0.500", "a dog", "0.000"]
    widths = page.run(
        "return [...document.querySelectorAll('[data-system=embedding] .bar')].map((bar) => bar.offsetWidth)"
    )
    assert len(widths) == 3
    assert widths == sorted(widths, reverse=True) and widths[-1] < widths[0]


def press_sample(page: Page, system: str) -> None:
    """Choose the sample image, and wait until the form shows it."""
    page.press(system, "[data-sample]")
    page.wait(lambda: page.form(system).find_element(By.TAG_NAME, "img").is_displayed())


@pytest.mark.slow
def test_image_boxes_send_the_sample(page: Page, triton: TritonStandIn) -> None:
    for system, shown in (("images", "pooler_output FP32 [1, 500]"), ("pets", HOSTILE)):
        press_sample(page, system)
        assert shown in page.send(system)
        assert triton.received[-1].model == system
        assert triton.received[-1].inputs["image_bytes"].texts()[0].startswith("/9j/")  # JPEG in base64
    press_sample(page, "clip")
    text = page.send("clip", texts="a dog\na landscape")
    assert "cosine similarity to the image" in text
    assert {"a dog", "a landscape"} < set(text.splitlines())


MASK = base64.b64encode(png_of(np.repeat([[0, 255]], 2, axis=0).astype(np.uint8))).decode()
DRAWN = [
    (
        "object-detection",
        [{"label": HOSTILE, "score": 0.9, "box": {"xmin": 96, "ymin": 64, "xmax": 192, "ymax": 256}}],
        [HOSTILE, "0.900"],
        "box => { const { style } = box.querySelector('.box'); return [style.left, style.width, style.height]; }",
        ["25%", "25%", "75%"],
    ),
    (
        "image-segmentation",
        [{"label": "sky", "score": None, "mask": MASK}],
        ["sky"],
        "box => { const { data } = box.querySelector('canvas + canvas').getContext('2d').getImageData(0, 9, 384, 1);"
        " return [data[4 * 10 + 3], data[4 * 374 + 3]]; }",
        [0, 255],
    ),
    (
        "depth-estimation",
        {"predicted_depth": [[0.0, 1.0]] * 2, "depth": MASK},
        ["ms"],
        "box => box.querySelector('canvas').width",
        2,
    ),
    (
        "table-question-answering",
        {"answer": "36", "coordinates": [[0, 1]], "cells": ["36"]},
        ["name age", "Ada 36"],
        "box => box.querySelector('.found').textContent",
        "36",
    ),
    (
        "text-to-audio",
        {"audio": base64.b64encode(wav(0, 1, 8000)).decode(), "sampling_rate": 8000},
        ["ms"],
        "box => box.querySelector('audio').error",
        None,
    ),
    ("keypoint-matching", [[{"score": 0.5}]], ['"score": 0.5'], "box => 0", 0),
]


@pytest.mark.slow
def test_answers_of_pipelines_are_drawn(page: Page, show: Callable) -> None:
    show(*(page_systems.pipeline(task, task, answer) for task, answer, *_ in DRAWN))
    for task, _, parts, script, value in DRAWN:
        form = page.form(task)
        for sample in form.find_elements(By.CSS_SELECTOR, "[data-sample]"):
            sample.click()
            page.wait(form.find_element(By.CSS_SELECTOR, "[data-preview]").is_displayed)
        text = page.send(task)
        assert all(part in text for part in parts), text
        assert page.run(f"return ({script})(document.querySelector('[data-system={task}] .answer'))") == value


def record(page: Page, system: str) -> None:
    """Record a moment of sound with the keyboard."""
    button = page.form(system).find_element(By.CSS_SELECTOR, "[data-record]")
    button.send_keys(Keys.ENTER)
    page.wait(lambda: button.text == "Stop recording" and button.is_enabled())
    # A moment without a sample would be refused.
    page.browser.execute_async_script("setTimeout(arguments[0], 3000)")
    button.send_keys(Keys.ENTER)
    page.wait(lambda: page.run("return document.querySelector('[name=audio]').files.length"))


@pytest.mark.slow
def test_sound_is_recorded_and_an_image_pasted(page: Page, triton: TritonStandIn, show: Callable) -> None:
    systems = ("hears", ASR, {"text": "hello"}), ("sees", "image-classification", [])
    # On a busy machine a recording gets longer.
    show(*(page_systems.pipeline(*system) for system in systems), limits=Limits(body=1_000_000))
    record(page, "hears")
    assert page.send("hears").startswith("hello")
    assert triton.received[-1].inputs["audio"].texts()[0].startswith("GkXfo")  # WebM in base64
    page.run(
        "const data = new DataTransfer(); data.items.add(new File(['x'], 'x.png', { type: 'image/png' }));"
        "document.dispatchEvent(new ClipboardEvent('paste', { clipboardData: data }))"
    )
    assert "nothing found" in page.send("sees", parameters='{"top_k": 3}')
    assert triton.received[-1].inputs["image"].texts() == ["eA=="]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_pipelines_of_the_server_take_what_the_browser_sends(chromium, stack, tmp_path) -> None:
    assemble_pipelines(stack, tmp_path, ("finds", "hears"))
    stack.serve("finds", "hears")
    page = Page(chromium, stack.gateway.replace("://", f"://anybody:{stack.client_key}@"))
    record(page, "hears")
    page.send("hears")
    assert page.answer("hears").find_elements(By.CSS_SELECTOR, "p.text")
    press_sample(page, "finds")
    page.send("finds", parameters='{"threshold": 0.0}')
    assert len(page.answer("finds").find_elements(By.CLASS_NAME, "box")) == 5  # the queries of the network
    assert page.send("finds", parameters="{").startswith("row 0 of 'parameters' is not valid JSON")


@pytest.mark.slow
def test_large_images_are_scaled_down(page: Page, tmp_path: Path) -> None:
    Image.effect_noise((640, 480), 90).save(tmp_path / "noise.bmp")
    page.form("pets").find_element(By.NAME, "image_bytes").send_keys(str(tmp_path / "noise.bmp"))
    assert "too large, also after" in page.send("pets")
    Image.new("RGB", (640, 480), "red").save(tmp_path / "plain.bmp")
    page.form("pets").find_element(By.NAME, "image_bytes").send_keys(str(tmp_path / "plain.bmp"))
    assert HOSTILE in page.send("pets")


@pytest.mark.slow
def test_streamed_text_grows(page: Page, triton: TritonStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    model, released = triton.models["writer_stream"], threading.Semaphore(0)
    answer = model.answer

    def one_by_one(inputs: dict[str, Tensor]) -> Iterator[list[Tensor]]:
        for tensors in answer(inputs):
            assert released.acquire(timeout=WAIT_S)
            yield list(tensors)

    monkeypatch.setattr(model, "answer", one_by_one)
    for prompt in ("", "count"):  # a chat, and a text
        if prompt:
            page.continue_text("writer")
        page.fill("writer", prompt="count")
        page.press("writer")
        for end in range(1, len(PIECES) + 1):
            released.release()
            page.wait_for_generated("writer", prompt + "".join(PIECES[:end]))
        page.wait(lambda: f"1 tokens read, {len(PIECES)} written" in page.text("writer"))
        assert "first token after" in page.text("writer") and "tokens/s" in page.text("writer")


@pytest.mark.slow
def test_stop_button_cancels_the_request(page: Page, triton: TritonStandIn) -> None:
    gate = triton.models["writer_stream"].gate
    gate.clear()
    try:
        page.fill("writer", prompt="Hello")
        page.press("writer")
        triton.wait_until(lambda: "writer_stream" in triton.running)
        page.press("writer", "[data-stop]")
        triton.wait_until(lambda: "writer_stream" in triton.cancelled)
        page.wait(lambda: "stopped" in page.text("writer"))
    finally:
        gate.set()
    # Nothing had come, so the message can be sent again.
    assert page.field("writer", "prompt").get_attribute("value") == "Hello"
    assert "Hello" not in page.text("writer")


@pytest.mark.slow
def test_stopped_answer_is_a_turn(page: Page, triton: TritonStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    model, released = triton.models["writer_stream"], threading.Event()
    answer = model.answer

    def one_piece(inputs: dict[str, Tensor]) -> Iterator[list[Tensor]]:
        first, *rest = map(list, answer(inputs))
        yield first
        released.wait(WAIT_S)
        yield from rest

    monkeypatch.setattr(model, "answer", one_piece)
    page.fill("writer", prompt="Hello")
    page.press("writer")
    page.wait_for_generated("writer", PIECES[0])
    page.press("writer", "[data-stop]")
    page.wait(lambda: "stopped" in page.text("writer"))
    released.set()
    page.send("writer", prompt="And?")
    sent = json.loads(triton.received[-1].inputs["messages"].texts()[0])
    assert [turn["content"] for turn in sent] == ["Hello", PIECES[0], "And?"]


@pytest.mark.slow
def test_failed_message_can_be_sent_again(page: Page, triton: TritonStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    page.send("writer", prompt="Hello")
    monkeypatch.setattr(triton.models["writer_stream"], "answer", lambda inputs: 1 / 0)
    text = page.send("writer", prompt="And?")
    assert text.startswith("Hello") and "And?" not in text
    error = page.answer("writer").find_element(By.CLASS_NAME, "error").text
    assert error.endswith(".")
    assert page.field("writer", "prompt").get_attribute("value") == "And?"
    monkeypatch.undo()
    assert "And?" in page.send("writer")
    assert "failed to load resource" in " ".join(page.log()).lower()


@pytest.mark.slow
def test_chat_box_sends_messages(page: Page, triton: TritonStandIn) -> None:
    page.field("writer", "system").send_keys("Be brief.")
    text = page.send("writer", prompt="Hello", max_tokens="2")
    assert [line.strip() for line in text.splitlines()[:2]] == ["Hello", "ein zwei"]
    assert "stopped at the maximum number of tokens" in text
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert json.loads(triton.received[-1].inputs["messages"].texts()[0]) == turns
    assert page.form("writer").find_element(By.NAME, "prompt").get_attribute("value") == ""
    page.field("writer", "prompt").send_keys("And", Keys.SHIFT, Keys.ENTER, Keys.NULL, "?", Keys.ENTER)
    page.wait(lambda: "And" in page.text("writer") and not page.answer("writer").get_attribute("aria-busy"))
    sent = json.loads(triton.received[-1].inputs["messages"].texts()[0])
    assert sent == [*turns, {"role": "assistant", "content": " ein zwei"}, {"role": "user", "content": "And\n?"}]
    assert '"content":"And\\n?"' in commands(page, "writer")[0]
    page.press("writer", "[data-new]")
    assert page.text("writer") == ""
    assert "And" not in commands(page, "writer")[0]
    assert not page.form("writer").find_element(By.CSS_SELECTOR, "[data-new]").is_displayed()


@pytest.mark.slow
def test_call_of_a_tool_is_shown_and_the_next_message_is_its_result(
    page: Page, triton: TritonStandIn, show: Callable
) -> None:
    inputs = GENERATION_INPUTS | {"sampling_parameters": ("STRING", [1])}
    called = ['<tool_call>\n{"name": "now", ', '"arguments": {"zone": "UTC"}}\n</tool_call>']
    model = generator("caller", inputs, pieces=called)
    model.optional, model.parameters = tuple(inputs), {"tool_parser": "hermes"}
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    show(model)
    page.field("caller", "tools").send_keys(json.dumps([tool]))
    text = page.send("caller", prompt="What time is it?")
    assert text.splitlines()[:2] == ["What time is it?", 'now({"zone": "UTC"})']
    assert "the next message is the result of the call" in text
    page.form("caller").find_element(By.NAME, "prompt").send_keys("12:00", Keys.ENTER)
    page.wait(lambda: "12:00" in page.text("caller") and not page.answer("caller").get_attribute("aria-busy"))
    asked, answered, result = json.loads(triton.received[-1].inputs["messages"].texts()[0])
    assert asked == {"role": "user", "content": "What time is it?"}
    assert answered["tool_calls"][0]["function"]["name"] == "now"
    assert (result["role"], result["content"]) == ("tool", "12:00")
    assert "Tools: this is not JSON" in page.send("caller", prompt="x", tools="[")


@pytest.mark.slow
def test_chat_box_sends_an_image_and_shows_reasoning(page: Page, triton: TritonStandIn, show: Callable) -> None:
    inputs = GENERATION_INPUTS | {"images": ("STRING", [-1])}
    model = generator("thinker", inputs, pieces=["<think>", "By", " mass.", "</think>", "Jupiter"])
    model.optional, model.parameters = tuple(inputs), {"reasoning": "think"}
    show(model)
    assert page.send("thinker", prompt="Which?").splitlines()[:3] == ["Which?", "By mass.", "Jupiter"]
    assert "images" not in triton.received[-1].inputs
    press_sample(page, "thinker")
    page.send("thinker", prompt="Which?")
    assert b"JFIF" in triton.received[-1].inputs["images"].data


@pytest.mark.slow
def test_generation_without_a_streaming_model_shows_the_whole_text(
    page: Page, triton: TritonStandIn, show: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(triton.models, "writer_stream")
    monkeypatch.setattr(triton.models["writer"], "parameters", {})  # it generates by itself
    show(triton.models["writer"])
    assert HOSTILE in page.send("writer", prompt="count")
    assert triton.received[-1].model == "writer"


@pytest.mark.slow
def test_errors_are_shown_with_the_name_of_the_field(page: Page) -> None:
    page.run("document.getElementById('names-input_text').value = 'word '.repeat(7000)")
    assert "larger than 30000 bytes" in page.send("names")
    assert page.send("writer", max_tokens="2", temperature="3").startswith("temperature: ")
    page.fill("writer", temperature="1")
    assert page.text("writer") == ""
    assert "failed to load resource" in " ".join(page.log()).lower()


@pytest.mark.slow
def test_figures_stay_fresh_and_keep_typed_text(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    page.fill("names", input_text="typed")
    monkeypatch.setitem(page_systems.FIGURES["embedding"], "seconds", 100.0)
    page.browser.execute_async_script("refresh().then(arguments[0])")
    assert "500 ms" in page.browser.find_element(By.CSS_SELECTOR, "[data-live=embedding-figures]").text
    assert page.form("names").find_element(By.NAME, "input_text").get_attribute("value") == "typed"
    assert not page.browser.find_element(By.ID, "changed").is_displayed()
    # A system that was not ready when the page was opened.
    page.run("document.querySelector('[data-system=pets] form').remove()")
    page.browser.execute_async_script("refresh().then(arguments[0])")
    assert page.browser.find_element(By.ID, "changed").is_displayed()


@pytest.mark.slow
def test_page_works_with_keyboard_and_has_labels(page: Page) -> None:
    unlabelled = page.run(
        "return [...document.querySelectorAll('input, textarea')].filter((field) => !field.labels.length).length"
    )
    assert unlabelled == 0
    page.form("sparse").find_element(By.NAME, "input_text").send_keys(Keys.TAB)
    assert page.browser.switch_to.active_element.text == "Send"
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    page.wait(lambda: "password" in page.text("sparse"))
    assert page.answer("sparse").aria_role == "status"
    assert page.answer("sparse").accessible_name == "Answer of sparse"


@pytest.mark.slow
def test_many_systems_are_found_by_an_index(page: Page) -> None:
    page.browser.find_element(By.ID, "filter").send_keys("WRITER")
    shown = [node.get_attribute("data-system") for node in page.browser.find_elements(By.CSS_SELECTOR, "article")
             if node.is_displayed()]  # fmt: skip
    assert shown == ["writer"]
    page.browser.find_element(By.ID, "filter").clear()
    page.run("document.getElementById('filter').dispatchEvent(new Event('input'))")
    page.browser.set_window_size(500, 900)
    try:
        assert not page.form("names").is_displayed()
        page.browser.find_element(By.CSS_SELECTOR, ".index [href='#names']").click()
        assert page.form("names").is_displayed()
        page.browser.find_element(By.CSS_SELECTOR, "[data-system=names] .fold").click()
        assert not page.form("names").is_displayed()
    finally:
        page.browser.set_window_size(1280, 900)


@pytest.mark.slow
@pytest.mark.parametrize("program", [0, 1], ids=["curl", "python"])
def test_commands_send_what_the_form_sends(page: Page, triton: TritonStandIn, tmp_path: Path, program: int) -> None:
    """Run the command of each form after its fields have changed, and compare what arrives with what the form sends."""
    (tmp_path / "image.jpg").write_bytes(png_of(np.zeros((2, 2, 3), np.uint8)))
    press_sample(page, "pets")
    text = 'It\'s 5 % "off" \\n 🥖 \ue000image;touch pwned;jpg\ue001'
    fields: dict[str, dict[str, str]] = {
        "embedding": {"query": text, "texts": f"{text}\n\nb"},
        "reranker": {"query": text, "texts": text},
        "classifier": {"input": text},
        "writer": {"prompt": text, "system": text, "max_tokens": "2", "temperature": "1.5"},
        "names": {"input_text": text},
        "pets": {},
    }
    for system, own in fields.items():
        for name, value in own.items():  # chromedriver types no emoji
            page.browser.execute_script(
                "const field = document.querySelector(`[data-system=${arguments[0]}] form`).elements[arguments[1]];"
                "field.value = arguments[2]; field.dispatchEvent(new Event('input', { bubbles: true }));",
                *(system, name, value),
            )
        command = commands(page, system)[program]
        page.press(system)
        page.wait(lambda system=system: page.text(system) and not page.answer(system).get_attribute("aria-busy"))
        sent = triton.received[-1].inputs
        triton.received.clear()
        run = ["bash", "-c", command] if program == 0 else [sys.executable, "-c", command]
        subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, timeout=WAIT_S)
        received = triton.received[-1].inputs
        different = {name for name in sent if name != "stream" and sent[name].data != received[name].data}
        assert different == ({"image_bytes"} if system == "pets" else set()), command
    assert b"\x89PNG" in received["image_bytes"].data  # of the folder
    assert [path.name for path in tmp_path.iterdir()] == ["image.jpg"]


@pytest.mark.slow
def test_page_fits_its_window(page: Page) -> None:
    page.send("names")
    try:
        for width in (NARROW, WIDE):
            device = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
            page.wait(lambda expected=width: page.run("return innerWidth") == expected)
            assert page.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        for scheme, expected in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(22, 27, 34)")):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            assert page.run("return getComputedStyle(document.body).backgroundColor") == expected
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.slow
def test_browser_sends_the_key_with_every_request(page: Page, show: Callable) -> None:
    show(keys=(sha256(KEY.encode()).digest(),))
    assert page.send("names").startswith("Marie Curie")
    page.browser.execute_async_script("refresh().then(arguments[0])")

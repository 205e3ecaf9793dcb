"""Requests to systems that generate text."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from tests.support.stacks import TestStack
from triton_transformers.http import opener

PROMPTS = ["I am going", "Which battery fits", "비 그친 뒤 골목에", "Grüße aus München 🥖", "  two  spaces ", "It"]
SECRET = "the zebra of the tests"
TYPES = {"max_new_tokens": "INT32", "temperature": "FP32", "top_p": "FP32", "seed": "INT64", "stop": "BYTES"}


def request(prompts: list[str], **options) -> dict:
    inputs = [{"name": "prompt", "datatype": "BYTES", "shape": [len(prompts)], "data": prompts}]
    for name, value in options.items():
        data = value if isinstance(value, list) else [value]
        inputs.append({"name": name, "datatype": TYPES[name], "shape": [len(data)], "data": data})
    return {"inputs": inputs}


def texts(stack: TestStack, model: str, prompts: list[str], **options) -> list[str]:
    (output,) = stack.triton.infer(model, request(prompts, **options))["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("text", "BYTES", [len(prompts)])
    return output["data"]


def text(stack: TestStack, model: str, prompt: str, **options) -> str:
    return texts(stack, model, [prompt], **options)[0]


def pieces(stack: TestStack, model: str, prompt: str | list[str], **options) -> list[str]:
    return [event["text"] for event in stack.triton.stream(model, {"prompt": prompt, **options})]


def counted(stack: TestStack, model: str) -> dict[str, float]:
    """Return the backend's counters, which it reports twice per second."""
    named = metrics(stack, model).items()
    return {name.removesuffix("_total"): value for name, value in named if name.endswith("_total")}


def settled(stack: TestStack, model: str) -> dict[str, float]:
    """Return the counters once they include everything that was counted before this call.

    Wait for two reports, because the first one may have begun before. Each ends with the memory in use, which changes.
    """
    used, reports = metrics(stack, model).get("memory_used_bytes"), 0

    def reported_twice() -> bool:
        nonlocal used, reports
        before, used = used, metrics(stack, model).get("memory_used_bytes")
        reports += used != before
        return reports >= 2

    stack.wait(reported_twice, f"two reports of {model}")
    return counted(stack, model)


def metrics(stack: TestStack, model: str) -> dict[str, float]:
    """Return the backend's metrics of a model."""
    page = opener.open(f"http://127.0.0.1:{stack.environment['TRITON_METRICS_PORT']}/metrics").read().decode()
    samples = re.findall(rf'^transformers_(\w+){{model="{model}",version="1"}} (\S+)$', page, re.MULTILINE)
    return {name: float(value) for name, value in samples}


def send_concurrently(count: int, ask) -> list:
    """Return ask(0) to ask(count - 1), all called at once."""
    with ThreadPoolExecutor(count) as clients:
        return list(clients.map(ask, range(count)))

"""Join the events of a stream into the answer that they make up, in the form that the API has for whole answers."""

from __future__ import annotations

import json
from typing import Any

# The fields that ask each API for a stream with all that a whole answer has.
ASKS = {"openai": {"stream": True, "stream_options": {"include_usage": True}}}


def read_events(body: bytes) -> list[Any]:
    """Return the data of all events. The name of one that has a name is its type."""
    events: list[Any] = []
    name = ""
    for line in body.decode().splitlines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line and line != "data: [DONE]":
            events.append(json.loads(line.removeprefix("data: ")))
            assert not name or name == events[-1]["type"]
    return events


def join(form: str, body: bytes) -> Any:
    assert form != "openai" or body.endswith(b"data: [DONE]\n\n")
    return JOINS[form](read_events(body))


def join_choices(events: list[Any]) -> Any:
    """Join the events of completions or of a chat, the last of which has the usage."""
    *events, last = events
    assert (last["choices"], {event["usage"] for event in events}) == ([], {None})
    choices: dict[int, Any] = {}
    for piece in (piece for event in events for piece in event["choices"]):
        choice = choices.setdefault(piece["index"], {"index": piece["index"], "logprobs": None})
        assert "finish_reason" not in choice or choice["finish_reason"] is None
        choice["finish_reason"] = piece["finish_reason"]
        if logprobs := piece["logprobs"]:
            before = choice["logprobs"] or {name: [] for name in logprobs}
            choice["logprobs"] = {name: logprobs[name] and before[name] + logprobs[name] for name in logprobs}
        if "text" in piece:
            choice["text"] = choice.get("text", "") + piece["text"]
        else:
            add_delta(choice.setdefault("message", {"content": "", "refusal": None}), piece["delta"])
    for choice in choices.values():
        if (message := choice.get("message", {})).get("tool_calls"):
            message["content"] = message["content"] or None
    kind = last["object"].removesuffix(".chunk")
    return last | {"object": kind, "choices": [choices[index] for index in sorted(choices)]}


def add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for call in delta.pop("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if call.pop("index") == len(calls):
            calls.append(call)
        else:
            assert call.keys() == {"function"} and call["function"].keys() == {"arguments"}
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    for name, value in delta.items():
        message[name] = message.get(name, "") + value


def join_blocks(events: list[Any]) -> Any:
    """Join the events of one of Anthropic's messages."""
    first, *others, delta, last = events
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert message["content"] == []
    for event in others:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"partial_json": ""})
        elif event["type"] == "content_block_delta":
            ((name, piece),) = [item for item in event["delta"].items() if item[0] != "type"]
            message["content"][event["index"]][name] += piece
        else:
            assert event == {"type": "content_block_stop", "index": len(message["content"]) - 1}
    for block in message["content"]:
        arguments = block.pop("partial_json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments) if delta["delta"]["stop_reason"] == "tool_use" else {}
    return message | delta["delta"] | {"usage": delta["usage"]}


def join_response(events: list[Any]) -> Any:
    """Return the response of the last event. The events before it must add up to its items."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, started, *others, last = events
    assert [event["type"] for event in (created, started)] == ["response.created", "response.in_progress"]
    assert created["response"] == started["response"]
    response = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert created["response"].keys() == response.keys()
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert [event["output_index"] for event in others] == sorted(event["output_index"] for event in others)
    for index, item in enumerate(response["output"]):
        begin, *pieces, end = [event for event in others if event["output_index"] == index]
        assert (begin["type"], end["type"]) == ("response.output_item.added", "response.output_item.done")
        assert (begin["item"]["id"], end["item"]) == (item["id"], item)
        assert {event["item_id"] for event in pieces} == {item["id"]}
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event.get("delta", "") for event in pieces) == whole
        (done,) = [event for event in pieces if event["type"].endswith(("text.done", "arguments.done"))]
        assert done.get("text", done.get("arguments")) == whole
        logprobs = [token for event in pieces if "delta" in event for token in event.get("logprobs", [])]
        assert item["type"] != "message" or logprobs == item["content"][0]["logprobs"]
    return response


def join_cohere(events: list[Any]) -> Any:
    """Join the events of Cohere's version 2."""
    start, *steps, end = events
    assert (start["type"], end["type"]) == ("message-start", "message-end")
    message: dict[str, Any] = {"role": start["delta"]["message"]["role"]}
    places: dict[str, list[int]] = {"content": [], "tool_calls": []}
    for step in steps:
        if step["type"].endswith("-end"):
            continue
        ((name, piece),) = step["delta"]["message"].items()
        if step["type"].endswith("-start"):
            message.setdefault(name, []).append(piece)
            places[name].append(step["index"])
            continue
        own = message[name][places[name].index(step["index"])]
        if name == "tool_calls":
            own["function"]["arguments"] += piece["function"]["arguments"]
        else:
            ((kind, text),) = piece.items()
            own[kind] += text
    return {"id": start["id"], "message": message, **end["delta"]}


def join_cohere_v1(events: list[Any]) -> Any:
    """Return the response of the last event. The texts before it must add up to its own."""
    response = events[-1]["response"]
    texts = [event["text"] for event in events if event["event_type"] == "text-generation"]
    assert (events[0]["event_type"], events[-1]["event_type"]) == ("stream-start", "stream-end")
    assert "".join(texts) == response["text"]
    return response


def join_text(events: list[Any]) -> Any:
    """Return the text of the last event of Hugging Face's generation."""
    last = events[-1]
    assert "".join(event["token"]["text"] for event in events) == last["generated_text"]
    return [{"generated_text": last["generated_text"]}]


JOINS = {
    "openai": join_choices,
    "anthropic": join_blocks,
    "responses": join_response,
    "cohere v2": join_cohere,
    "cohere v1": join_cohere_v1,
    "tei": join_text,
}

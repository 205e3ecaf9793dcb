"""The rows of all APIs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.conformance.apis import audio, cohere, embeddings, hugging_face, messages, openai_text, responses, tei
from tests.conformance.apis.run import ABSENT, Case, Given

APIS = (openai_text, responses, messages, embeddings, cohere, tei, hugging_face, audio)
CASES: list[Case] = [case for api in APIS for case in api.CASES]
BY_ID = {case.id: case for case in CASES}
GIVEN = [(case, Given({}, {})) for case in CASES if case.triton is not None]
GIVEN += [(BY_ID[id], given) for api in APIS for id, rows in api.GIVEN.items() for given in rows]
WRONG = [(BY_ID[id], wrong) for api in APIS for id, rows in api.WRONG.items() for wrong in rows]


def good_bodies(systems: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the JSON of each good request to these models, under the names of systems that are served.

    Those with a grammar are left out: a process of its own checks it, which starts late and may end.
    """
    for case, given in GIVEN:
        if "structured_outputs" in (given.triton or {}):
            continue
        body = {name: value for name, value in (case.body | given.fields).items() if value is not ABSENT}
        name = given.system or case.system or body.get("model")
        if not case.is_form and (name is None or name in systems):
            renamed = {"model": systems.get(body["model"], body["model"])} if "model" in body else {}
            yield case.path.replace("{model}", systems.get(name or "", "")), body | renamed

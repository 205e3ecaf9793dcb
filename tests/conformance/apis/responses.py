"""OpenAI's responses."""

from tests.conformance.apis.run import Case

BODY = {"model": "counter", "input": "a"}
CASES = [Case("responses", "/v1/responses", BODY, stream="responses", prompt="input")]

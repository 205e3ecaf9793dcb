"""Text encoders with routes: one encoder for queries, another for documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import triton_python_backend_utils as pb_utils

from serving.encoders.packed import PackedEncoder
from serving.text.embedding_prompts import NAME, alternatives
from serving.text.tokenization import is_set
from serving.triton import responses
from serving.triton.backend import BatchBackend
from serving.triton.parameters import parameter
from serving.triton.types import BadRequest, InstanceArgs, ModelConfig

# The name of a prompt -> the parameter that names its route; the last one is for all other requests.
ROUTES = {"query": "query_route", "document": "document_route", "": "default_route"}


class RoutedEncoder(PackedEncoder):
    """A packed encoder, or one for each route of a Router of sentence-transformers.

    Each route has a folder in that of the version, and its own parameters.
    """

    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        self.routes = {name: route for name, key in ROUTES.items() if (route := parameter(config, key))}
        self.encoders = {route: type(self)() for route in self.routes.values()}
        if not self.encoders:
            super().set_up(config, args)
        for route, encoder in self.encoders.items():
            encoder.set_up(*of_route(route, config, args))
            self.engine_labels = encoder.engine_labels

    def initialize(self, args: InstanceArgs) -> None:
        super().initialize(args)
        for encoder in self.encoders.values():
            encoder.metrics = self.metrics

    def finalize(self) -> None:
        for encoder in self.encoders.values():
            encoder.long_requests.close()
        if self.encoders:
            BatchBackend.finalize(self)
        else:
            super().finalize()

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse | None]:
        if not self.encoders:
            return super().execute(requests)
        answers: dict[int, pb_utils.InferenceResponse | None] = {}
        numbers: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            try:
                numbers[self.route(request)].append(number)
            except BadRequest as error:
                answers[number] = responses.error_response(error, responses.asks_typed(request))
        for route, own in numbers.items():
            answers |= zip(own, self.encoders[route].execute([requests[number] for number in own]), strict=True)
        return [answers[number] for number in range(len(requests))]

    def route(self, request: pb_utils.InferenceRequest) -> str:
        """Return the route of all rows of a request."""
        names = responses.texts(request, NAME) if is_set(request, NAME) else []
        default = self.routes.get("", "")
        routes = {
            next((self.routes[choice] for choice in alternatives(name) if choice in self.routes), default)
            for name in names or [""]
        }
        if len(routes) > 1:
            raise BadRequest(f"input '{NAME}': send queries and documents in requests of their own", NAME)
        if "" in routes:
            raise BadRequest(f"input '{NAME}' must be {' or '.join(self.routes)}: this model has no other route", NAME)
        return routes.pop()


def of_route(route: str, config: ModelConfig, args: InstanceArgs) -> tuple[ModelConfig, InstanceArgs]:
    """Return the configuration and arguments of a route's encoder, with its own parameters and those of no route."""
    own, shared = {}, {}
    for name, value in config.get("parameters", {}).items():
        owner, dot, key = name.rpartition(".")
        if not dot and name not in ROUTES.values():
            shared[name] = value
        elif owner == route:
            own[key] = value
    folder = Path(args["model_repository"]) / args["model_version"]
    return config | {"parameters": shared | own}, args | {"model_repository": str(folder), "model_version": route}

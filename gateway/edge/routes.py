"""Find the route of a request: by its path in a table, and only for paths with parameters by pattern."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from gateway.edge.bodies import JSON_BODY, MediaTypes
from gateway.edge.errors import ApiError, ErrorForm, openai_form, shown

# The label in the metrics of all paths that are no route.
OTHER = "other"
Endpoint = Callable[[Request], Awaitable[Response]]


class ApiRoute(Route):
    """A path of an API, which answers for systems with one of the abilities (System.abilities).

    `answers_for` tells another way for which systems it does.
    """

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        abilities: str = "",
        error_form: ErrorForm | None = openai_form,
        method: str = "POST",
        is_shown: bool = True,
        body: MediaTypes = JSON_BODY,
        answers_for: Callable[[Any], bool] | None = None,
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        able = frozenset(abilities.split())
        self.answers_for = answers_for or (lambda system: system.can(able))
        self.error_form = error_form  # None: that of the client
        self.body = body
        self.is_shown = is_shown  # on the page: not the second path of the same API


def api(
    paths: str,
    endpoint: Endpoint,
    abilities: str = "",
    error_form: ErrorForm | None = openai_form,
    method: str = "POST",
) -> list[ApiRoute]:
    """Return the routes of these paths. The page shows the first of them."""
    return [
        ApiRoute(path, endpoint, abilities, error_form, method, is_shown=number == 0)
        for number, path in enumerate(paths.split())
    ]


class Routes:
    """The gateway's routes. Each path and method is in one of them."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact: defaultdict[str, list[Route]] = defaultdict(list)
        for route in routes:
            if not route.param_convertors:
                self._exact[route.path].append(route)
        self._patterns = [route for route in routes if route.param_convertors]
        self.shown = [route for route in routes if isinstance(route, ApiRoute) and route.is_shown]

    def match(self, scope: Scope) -> Route | None:
        """Return the route of the path and method, or of the path for another method, or None."""
        if routes := self._exact.get(scope["path"]):
            return next((route for route in routes if scope["method"] in methods(route)), routes[0])
        for route in self._patterns:
            match, parameters = route.matches(scope)
            if match is not Match.NONE:
                scope.update(parameters)
                return route
        return None

    def not_found(self, path: str) -> ApiError:
        similar = (f"/v1{path}", path.rstrip("/"), path.removeprefix("/v1"))  # /v1/v1, if a base URL should have none
        suggestion = next((route for route in similar if route in self._exact), "")
        hint = f" Did you mean {suggestion}?" if suggestion else ""
        return ApiError(404, f"There is nothing at {shown(path)}.{hint}", code="not_found")

    def check_method(self, route: Route, scope: Scope) -> None:
        """Raise ApiError 405 if the route does not answer this method."""
        if scope["method"] not in methods(route):
            same_path = self._exact.get(route.path, [route])
            allowed = ", ".join(sorted(set().union(*map(methods, same_path))))
            message = f"{shown(scope['path'])} answers {allowed}, not {scope['method']}."
            raise ApiError(405, message, headers={"allow": allowed})


def methods(route: Route) -> set[str]:
    return route.methods or set()

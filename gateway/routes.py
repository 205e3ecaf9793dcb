"""Find the route of a request: by its path in a table, and only for paths with parameters by pattern."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import Match, Route
from starlette.types import Scope

from gateway.api_error import ApiError, shown

# The label in the metrics of all paths that are no route.
OTHER = "other"


class Routes:
    """The gateway's routes. Each path is in one of them."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact = {route.path: route for route in routes if not route.param_convertors}
        self._patterns = [route for route in routes if route.param_convertors]

    def label(self, path: str) -> str:
        """Return what metrics call the route of a path without parameters."""
        return path if path in self._exact else OTHER

    def find(self, scope: Scope) -> Route:
        """Return the route of the path, for whatever method. Raise ApiError 404 if there is none."""
        if route := self._exact.get(scope["path"]):
            return route
        for route in self._patterns:
            match, parameters = route.matches(scope)
            if match is not Match.NONE:
                scope.update(parameters)
                return route
        suggestion = next(
            (route for route in (f"/v1{scope['path']}", scope["path"].rstrip("/")) if route in self._exact), ""
        )
        hint = f" Did you mean {suggestion}?" if suggestion else ""
        raise ApiError(404, f"There is nothing at {shown(scope['path'])}.{hint}", code="not_found")


def check_method(route: Route, scope: Scope) -> None:
    """Raise ApiError 405 if the route does not answer this method."""
    methods = route.methods or set()
    if scope["method"] not in methods:
        allowed = ", ".join(sorted(methods))
        message = f"{shown(scope['path'])} answers {allowed}, not {scope['method']}."
        raise ApiError(405, message, headers={"allow": allowed})

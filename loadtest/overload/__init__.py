"""make loadtest OVERLOAD: more requests than the server can answer."""

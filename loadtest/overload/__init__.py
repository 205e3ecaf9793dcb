"""Send more requests than the server can answer: make loadtest OVERLOAD."""

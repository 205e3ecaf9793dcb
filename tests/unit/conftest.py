import locust  # noqa: F401  (it patches ssl, which must not be in use by then, whichever test module comes first)

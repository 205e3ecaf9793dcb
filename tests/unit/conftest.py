"""Import Locust before any test module, without gevent's patches: they end pytest-xdist's workers."""

import os

os.environ["LOCUST_SKIP_MONKEY_PATCH"] = "1"
import locust  # noqa: F401

del os.environ["LOCUST_SKIP_MONKEY_PATCH"]

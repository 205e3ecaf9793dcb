"""The clients of the gateway's APIs, in a folder of their own."""

from __future__ import annotations

import os

import pytest

from triton_transformers.settings import ROOT

CLIENTS = ROOT / os.environ.get("OPENAI_CLIENTS", ".local/openai-clients")
INSTALL = "`make test-stack SLOW=1 OPENAI_CLIENTS=.local/openai-clients` installs it"
NEEDS_CLIENTS = pytest.mark.skipif(not CLIENTS.is_dir(), reason=f"the package openai is missing: {INSTALL}")

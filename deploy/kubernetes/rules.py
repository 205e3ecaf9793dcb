"""Write Prometheus' rules for prometheus-operator, or check them: python -m deploy.kubernetes.rules [--check].

A PrometheusRule must contain the rules themselves, and kustomize cannot put a file into it.
"""

from __future__ import annotations

import argparse
import textwrap

from triton_transformers.cli import err, out, run
from triton_transformers.settings import ROOT

SOURCES = ROOT / "monitoring/prometheus/rules"
TARGET = ROOT / "deploy/kubernetes/components/monitoring/objects/rules.yaml"
HEADER = "# Written by `make kubernetes-rules` from monitoring/prometheus/rules.\n"
OBJECT = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {name}
spec:
{rules}"""


def objects() -> str:
    """Return one object for each file. Its text is kept, with the comments."""
    return HEADER + "---\n".join(
        OBJECT.format(name=path.stem, rules=textwrap.indent(path.read_text(), "  "))
        for path in sorted(SOURCES.glob("*.yml"))
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.kubernetes.rules", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the file would change")
    checking = parser.parse_args().check
    text, name = objects(), TARGET.relative_to(ROOT)
    if TARGET.exists() and TARGET.read_text() == text:
        return 0
    if checking:
        err.print(f"{name} differs from {SOURCES.relative_to(ROOT)}. Run `make kubernetes-rules`")
        return 1
    TARGET.write_text(text)
    out.print(f"written  {name}")
    return 0


if __name__ == "__main__":
    run(main)

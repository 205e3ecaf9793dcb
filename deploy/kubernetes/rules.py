"""Write Prometheus' rules for prometheus-operator: python -m deploy.kubernetes.rules.

A PrometheusRule must contain the rules themselves, and kustomize cannot put a file into it.
"""

from __future__ import annotations

import textwrap

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


if __name__ == "__main__":
    TARGET.write_text(objects())

#!/usr/bin/env bash
# Prints Prometheus' rules for prometheus-operator. A PrometheusRule must contain the rules themselves, and kustomize
# cannot put a file into it.
set -euo pipefail
cd "$(dirname "$0")/../.."

# shellcheck disable=SC2016  # the backticks are Markdown's
first='# Written by `make kubernetes-rules` from monitoring/prometheus/rules.'
for file in monitoring/prometheus/rules/*.yml; do
  printf '%s\n' "$first" 'apiVersion: monitoring.coreos.com/v1' 'kind: PrometheusRule' 'metadata:' \
    "  name: $(basename "$file" .yml)" 'spec:'
  sed 's/^./  &/' "$file"
  first=---
done

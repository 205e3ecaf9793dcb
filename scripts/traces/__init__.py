"""The receiver of traces of the local runtime (docs/tracing.md)."""

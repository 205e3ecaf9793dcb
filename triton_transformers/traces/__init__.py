"""The receiver of traces (docs/tracing.md)."""

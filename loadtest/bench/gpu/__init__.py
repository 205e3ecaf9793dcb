"""Figures of a machine with a GPU, and the kit that takes them on one without a network: docs/accelerators.md."""

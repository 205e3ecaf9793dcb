"""The figures of docs/benchmarks.md, measured on this machine: `make bench BENCH=...`."""

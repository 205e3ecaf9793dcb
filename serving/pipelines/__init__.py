"""Any pipeline of transformers, with its inputs and outputs as JSON and files."""

"""Run any pipeline of transformers, with inputs and outputs as JSON and files."""

"""The parts of gen_triton_model.py: arguments to a specification, a specification to a model folder."""

"""The parts of gen_triton_model.py: a command line is read (flags, order), and the folder written (folder)."""

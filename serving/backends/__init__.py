"""The Triton backends: images/triton/backends/<name>/model.py has the class of <name>.py."""

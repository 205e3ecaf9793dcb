"""Define the tasks of systems, their examples and the form of their answers."""

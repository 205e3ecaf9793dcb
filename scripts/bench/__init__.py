"""make bench: the figures of the docs, on this machine. One module a subject, each with a server of its own."""

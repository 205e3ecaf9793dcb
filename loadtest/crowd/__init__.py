"""The users of a comparison: in this process, or in worker processes."""

"""The users of a comparison, in this process (local.py) or in worker processes (master.py, worker.py)."""

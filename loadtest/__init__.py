"""Locust against Triton: what dynamic batching buys, measured on the running server.

workload.py how much is sent, examples.py and pictures.py what; users.py who sends it; crowd.py all of them, in this
process or (master.py, worker.py) in others; batching.py switches the server; experiment.py the rounds and windows;
results.py the numbers and the verdict; report.py what a person reads.
"""

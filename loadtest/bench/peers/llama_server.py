"""llama.cpp's own server, which batches continuously, in this process."""

from __future__ import annotations

import os
import sys
import threading

import xllamacpp

TEXTS, CONTEXT = 32, 512  # of each text

if __name__ == "__main__":
    model, port = sys.argv[1:]
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.port = int(port)
    parameters.n_parallel, parameters.n_ctx = TEXTS, TEXTS * CONTEXT
    threads = len(os.sched_getaffinity(0))
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)
    threading.Event().wait()

"""Measure a running server under load: compare, tune, overload, break it, and take the figures of the docs.

load/      workloads, requests, users and their processes    measure/   windows, and the numbers and verdicts of them
server/    the machine, and the modes on the server          reports/   the table, the figures and the files
compare/   make loadtest                                     overload/  make loadtest OVERLOAD
tune/      make tune                                         drills/    make drill, and the soak
bench/     make bench: the figures of the docs               locustfile.py, for Locust's own page: make locust
"""

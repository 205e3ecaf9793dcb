"""The comparison of dynamic batching with the modes without it on a running server, under Locust's users.

workload.py   the named workloads: texts, users, pace    windows.py     the rounds, and what each window measured
examples.py   the requests, for the system's inputs     statistics.py  the numbers and the verdict
encoding.py   the requests as they go over the wire     charts.py      the figures
users.py      Locust's users                            report.py      the files of a report
crowd/        the users of one or several processes     table.py       the verdict on the terminal
switching.py  the modes on the server                   telemetry.py   what Prometheus scrapes meanwhile
instances.py  if one instance per core fits             interrupt.py   Ctrl-C while it runs
generating.py what differs for systems that generate    compare.py     the command that brings these together
arrivals.py   requests that arrive at a rate            tune/          make tune: the search and its report
same_answers.py  if another configuration      sample.py      what is measured of one request
              answers the same
"""

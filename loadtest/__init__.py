"""The comparison of dynamic batching with the modes without it on a running server, under Locust's users.

workload.py   the named workloads: texts, users, pace   windows.py     the rounds, and the measurements of a window
examples.py   the requests, for the system's inputs     sample.py      the measurements of one request
encoding.py   the requests as they go over the wire     statistics.py  the numbers and the verdict
users.py      Locust's users                            charts.py      the figures
crowd/        the users of one or several processes     waterfalls.py  the slowest requests, from traces
arrivals.py   requests that arrive at a rate            report.py      the files of a report
switching.py  the modes on the server                   table.py       the verdict on the terminal
instances.py  whether one instance per core fits        telemetry.py   what Prometheus scrapes meanwhile
generating.py what differs for systems that generate    interrupt.py   Ctrl-C during a comparison
host.py       the machine                               compare.py     the command that brings these together

overload.py      make loadtest OVERLOAD: more requests than the server can answer
tune/            make tune: the search and its report; same_answers.py compares the answers of its candidates
locust_page.py   make locust: Locust's own web page, which loads locustfile.py
"""

"""The comparison of dynamic batching with the modes without it on a running server, under Locust's users.

workload.py      the named workloads: texts, users, pace    windows.py     the rounds, and what a window measures
examples.py      the requests, for the system's inputs      statistics.py  the numbers and the verdict
users.py         the users of one process                   waterfalls.py  the slowest requests, from traces
worker_users.py  the users in several processes (worker.py) report.py      the table, the figures and the files
locust_users.py  what each user sends and receives          telemetry.py   what Prometheus scrapes meanwhile
arrivals.py      requests that arrive at a rate             machine.py     the machine, and other programs on it
switching.py     the modes on the server                    compare.py     the command that brings these together
generating.py    what differs for systems that generate     agreement.py   how near a format's answers are

overload.py      make loadtest OVERLOAD: more requests than the server can answer
tune/            make tune: the search and its report
locust_page.py   make locust: Locust's own web page, which loads locustfile.py
"""

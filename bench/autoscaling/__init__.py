"""Simulate days of load, to compare what Kubernetes can scale on: `make bench BENCH=autoscaling`.

benchmark.py              the command: measures, simulates, prints, draws
measured_replica.py       one server on one core, measured
steady_replica.py         the same server at a constant rate, simulated
horizontal_autoscaler.py  Kubernetes' algorithm
simulated_day.py          replicas, metrics and autoscalers through a day
"""

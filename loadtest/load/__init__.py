"""The load: workloads, requests, users and the processes that run them."""

"""Make the load: workloads, requests, users and their processes."""

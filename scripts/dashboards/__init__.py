"""The dashboards: throughput.py, batching.py and hardware.py say what is on them, panels.py how all of them look.

`make dashboards-json` writes them for Grafana into monitoring/grafana. page.py (`make dashboards`) reads that JSON,
asks Prometheus what Grafana would ask (evaluate.py), and draws it without Grafana (draw.py).
"""

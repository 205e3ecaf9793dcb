"""The dashboards. `definitions` is what Grafana shows, `render` draws the same without Grafana.

`make dashboards-json` writes the definitions into monitoring/grafana. `make dashboards` reads that JSON, asks
Prometheus what Grafana would ask, and draws one page.
"""

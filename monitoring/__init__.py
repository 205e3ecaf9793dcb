"""Watch the stack. `definitions` has the dashboards that Grafana shows, and `drawing` draws them without it.

`make dashboards-json` writes the definitions into grafana/. `make dashboards` reads that JSON, asks Prometheus what
Grafana would ask, and draws one page.
"""

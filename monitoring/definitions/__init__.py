"""The definitions of the Grafana dashboards."""

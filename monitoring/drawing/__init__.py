"""The dashboards as one HTML page, without Grafana."""

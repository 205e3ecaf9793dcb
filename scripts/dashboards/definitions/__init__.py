"""What the Grafana dashboards show."""

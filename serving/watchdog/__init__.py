"""Programs beside tritonserver. Standard library only: they run in every image."""

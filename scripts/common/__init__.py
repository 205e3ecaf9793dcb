"""What every feature uses. Nothing here imports a feature."""

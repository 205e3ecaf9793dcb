"""What a checkpoint is, and whether we may serve it."""

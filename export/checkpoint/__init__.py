"""Find out what a checkpoint is, and refuse what would be served wrongly."""

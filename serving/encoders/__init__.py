"""Turn texts into vectors, scores and labels, in packed runs."""

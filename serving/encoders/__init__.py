"""From texts to vectors, scores and labels."""

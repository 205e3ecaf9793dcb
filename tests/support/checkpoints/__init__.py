"""Small models of real architectures, random weights, saved as save_pretrained saves them."""

"""The ground: what every other folder may import. It imports none of them."""

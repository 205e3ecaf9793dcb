"""Models that generate texts: their requests, and the engines that batch them."""

"""Generate texts: requests, and the engines that batch them."""

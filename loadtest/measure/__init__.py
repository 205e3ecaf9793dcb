"""Windows of a measurement, and the numbers that follow from them."""

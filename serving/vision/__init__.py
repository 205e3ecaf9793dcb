"""Images: their files, their processors, and models that take them."""

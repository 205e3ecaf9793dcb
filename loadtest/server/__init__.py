"""Switch the modes of the server under load, and describe the machine."""

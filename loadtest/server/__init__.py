"""The server under load: the machine, the modes, and what differs for systems that generate."""

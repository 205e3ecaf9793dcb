"""make bench BENCH=architectures: small models of many architectures, served and compared with the library."""

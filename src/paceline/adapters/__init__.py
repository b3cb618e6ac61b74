"""Other engines: those that start the workers of a fleet, and those whose loops it runs; each is imported only when it is
asked for."""

"""Other engines that start the workers of a fleet; each is imported only when it is asked for."""

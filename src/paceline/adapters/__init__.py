"""Other engines: some start a fleet's workers, some bring the loop. Each is imported only when it is asked for."""

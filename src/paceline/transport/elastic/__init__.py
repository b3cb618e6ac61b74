"""A fleet whose workers come and go."""

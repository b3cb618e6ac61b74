"""What a log says: pure figures, no words."""

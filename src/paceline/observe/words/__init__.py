"""The words about a run: numbers as people read them, one-line texts, and the closing verdict."""

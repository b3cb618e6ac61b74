"""What a script may not do: each check names the worker, the object and the line to write instead."""

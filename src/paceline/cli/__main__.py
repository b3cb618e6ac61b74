"""``python -m paceline.cli`` is the command ``paceline``, for where the command itself is not on the path."""

from paceline.cli import main

main()

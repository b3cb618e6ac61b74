"""The command ``paceline`` as ``python -m paceline.cli``, for when the command itself is not on the path."""

from paceline.cli import main

main()

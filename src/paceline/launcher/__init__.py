"""The launcher: it starts the workers of a fleet on this computer, and supervises them until all have ended.

The room has this name because a package ``paceline.launch`` would hide the public function.
"""

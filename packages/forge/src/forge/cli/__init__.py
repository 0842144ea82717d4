"""Words of a shell → calls of the public API, and errors → one message and an exit status.

Files here import every other folder of the package; none imports this one.
"""

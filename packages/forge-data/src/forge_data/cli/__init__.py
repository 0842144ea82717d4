"""Words of a shell → the calls that Python makes, and their results as text and exit status.

May import every folder.
"""

"""Command line → calls of the public API, and their results as text and exit status.

May import every folder.
"""

"""Run directory → a copy of it at a URL, complete or not counted, and a run directory again.

Imports the package's own files, `locking` and `settings`.
"""

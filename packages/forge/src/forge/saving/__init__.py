"""Model and progress of a run → exports and full states on disk, proved, recorded by hash.

Files here import `settings`, `tasks`, `memory`, the package's own top-level modules and the leaf packages; not `run` or what is
above it.
"""

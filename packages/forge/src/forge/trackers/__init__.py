"""The record of a run → trackers and callbacks, which cannot touch the run.

Files here import the package's own top-level modules, and no other folder.
"""

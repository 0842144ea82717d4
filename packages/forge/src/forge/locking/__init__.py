"""Run directory → one owner at a time, on this host or another, that knows when it lost it.

Files here import the package's own top-level modules, and no other folder.
"""

"""A shell script → the commands that it runs.

Files here import the package's own top-level modules, no other folder of `forge`.
"""

"""Names and values from a call, flags or a recipe → composed settings, and back.

Files here import the package's own top-level modules and the leaf packages, no other folder of `forge`.
"""

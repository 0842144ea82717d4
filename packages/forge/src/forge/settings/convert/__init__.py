"""Settings of other libraries → a recipe, and what was not carried over.

Files here import `settings`, the package's own top-level modules and the leaf packages, no other folder of `forge`.
"""

"""Stores of rows → items that a batch plan numbers, and items → micro-batches.

Files here import the package's own top-level modules and the leaf packages, no other folder of `forge`.
"""

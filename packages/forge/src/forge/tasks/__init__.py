"""Prepared data and a batch plan → micro-batches of each step, and held-out figures.

Files here import `tasks/items`, `settings`, the package's own top-level modules and the leaf packages; not `run` or `verbs`.
"""

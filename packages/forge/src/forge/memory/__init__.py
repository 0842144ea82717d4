"""Settings and data of a run → the memory that it will take, phase by phase.

Files here import `tasks`, `settings`, the package's own top-level modules and the leaf packages; not `run`, `verbs` or `cli`.
"""

"""A finished run, or a model directory → a directory or GGUF file to hand on.

Files here import `run`, `tasks`, `settings`, the package's own top-level modules and the leaf packages; not `verbs`, `reports`
or `cli`.
"""

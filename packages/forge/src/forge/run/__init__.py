"""A task and its settings → a finished run in its run directory, on one process or many.

Files here import `tasks`, `settings`, the package's own top-level modules and the leaf packages; not `verbs`, `exporting`,
`reports` or `cli`.
"""

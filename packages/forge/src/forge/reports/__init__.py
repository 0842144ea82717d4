"""A run or a batch plan → pages and drawings for a person, one file each, without network.

Files here import `run`, `tasks`, `settings`, the package's own top-level modules and the leaf packages; not `verbs`,
`exporting` or `cli`.
"""

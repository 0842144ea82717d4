"""A trained model → answers: to a prompt, in a conversation, over HTTP, to the tasks of a benchmark.

Files here import `run`, `settings`, the package's own top-level modules and the leaf packages; not `verbs`, `exporting`,
`reports` or `cli`.
"""

"""A trained model → answers: to a prompt, in a conversation, over HTTP.

Files here import `run`, `settings`, the package's own top-level modules and the leaf packages; not `verbs`, `exporting`,
`reports` or `cli`.
"""

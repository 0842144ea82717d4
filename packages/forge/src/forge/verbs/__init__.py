"""Settings of a training verb → the function that users call, such as `forge.sft`.

Files here import `backends`, `run`, `tasks`, `settings`, the package's own top-level modules and the leaf packages; not
`exporting`, `reports` or `cli`.
"""

"""A teacher and rows → its likeliest tokens at each learned token, on disk.

Files here import `talking`, `tasks`, `saving`, the package's own top-level modules and the leaf packages; not `cli`.
"""

"""Files of a run, or a batch plan → pages for a person, one file each, without network.

Files here import `settings`, the package's own top-level modules and the leaf packages; a run renews its own page with them.
"""

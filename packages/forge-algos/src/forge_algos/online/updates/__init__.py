"""A rollout → the packed batches of its updates, on each data shard.

Files here import online/rollout, batches, and the package's own files.
"""

"""`data_path` → store: chunks of rows to workers, batches back in order, accounting, lint, fingerprint.

May import every folder but `cli` and `viewing`.
"""

"""`data_path` → store: workers, batches in order, accounting, lint, fingerprint.

May import every folder but `cli` and `viewing`.
"""

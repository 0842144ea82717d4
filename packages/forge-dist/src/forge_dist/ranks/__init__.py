"""Worker topology → joined ranks: store, exact sums, heartbeat, reports of failures.

Its files may import `environment`, `loading` and the package's own files.
"""

"""Named tensors of all ranks ↔ full states on disk, verified, read under any division.

Its files may import `ranks` and the package's own files.
"""

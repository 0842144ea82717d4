"""Model in memory, whole or divided → a directory that plain transformers or PEFT loads.

Its files may import `strategies`, `adapters`, `loading`, `ranks` and the package's own files.
"""

"""PEFT models ↔ the adapter directories that plain PEFT loads; merging into the base model.

Its files may import `loading` and the package's own files.
"""

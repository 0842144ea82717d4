"""A model → proof that it keeps packed documents apart, and hooks against mixing them.

Files here import the package's own files and batches.
"""

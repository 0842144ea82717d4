"""Prompts → completions drawn from a model.

Files here import the package's own files; nothing else of online.
"""

"""Completions with rewards and log-probabilities ↔ a rollout, in memory and as a file.

Files here import the package's own files; nothing else of online.
"""

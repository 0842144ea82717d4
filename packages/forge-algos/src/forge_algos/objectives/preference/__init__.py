"""Pairs or judged completions → preference losses on a model, and their references.

Files here import objectives, adaptations, heads, and what stands below them.
"""

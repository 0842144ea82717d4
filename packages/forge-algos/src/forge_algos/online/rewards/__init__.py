"""Completions → rewards: functions of text, and reward models.

Files here import heads, isolation, batches, and the package's own files; nothing else of online.
"""

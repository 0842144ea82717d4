"""Traced text and `train_on` → learned character spans, segments by role, and token mask.

May import `chat_template` and `formats`.
"""

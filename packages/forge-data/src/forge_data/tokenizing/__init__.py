"""`Sample` → `input_ids`, `labels` and segments, a batch at a time; then `on_overflow` for what is too long.

May import `masking`, `chat_template` and `formats`.
"""

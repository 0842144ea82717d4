"""`Sample` → `input_ids`, `labels` and segments in batches; long samples by `on_overflow`.

May import `masking`, `chat_template` and `formats`.
"""

"""Raw record → `Sample`: conversation, prompt and completion, preference, document or token ids.

May import the package's own modules only, and knows neither files nor tokenizers.
"""

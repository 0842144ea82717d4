"""Raw record → `Sample`: conversation, prompt and answer, preference, document, token ids.

May import the package's own modules only, and knows neither files nor tokenizers.
"""

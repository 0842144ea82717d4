"""Log-probabilities or rewards of completions → preference losses.

Files here import losses, and what losses may import.
"""

"""Hidden states of a forward → scores of chosen positions: log-probabilities, losses.

Files here import isolation, losses, and what stands below them.
"""

"""Log-probabilities, rewards and values of sampled tokens → advantages and policy losses.

Files here import losses, and what losses may import.
"""

"""A model without data and the batches of a step → the bytes that training on them takes, and what they are for.

Files here import everything of this package but `online`; no other folder imports them.
"""

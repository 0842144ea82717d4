"""A model without data and batches → the bytes that training takes, and what for.

Files here import everything of this package but `online`; no other folder imports them.
"""

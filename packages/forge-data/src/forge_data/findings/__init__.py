"""Findings of the lint → report, as text and JSON; and the table of the lint's rules.

May import the package's own modules only; it lies below `store`, which keeps a report beside the tokens.
"""

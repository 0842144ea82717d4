"""The lint's vocabulary: a finding, the table of rules, the report. Findings → report → text and JSON.

May import the package's own modules only; it lies below `store`, which keeps a report beside the tokens.
"""

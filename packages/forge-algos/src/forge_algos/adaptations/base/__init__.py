"""Names of targets → linear layers of a model; and the base class of every adaptation.

Files here import heads, settings, and what stands below them.
"""

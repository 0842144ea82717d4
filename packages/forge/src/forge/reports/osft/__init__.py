"""OSFT run → a summary and a page of what was protected and what moved.

Files here import `run`, `reports`, the package's own top-level modules and the leaf packages.
"""

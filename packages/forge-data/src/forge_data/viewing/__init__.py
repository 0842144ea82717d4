"""Store → what a person reads: lines for a terminal, one HTML page, statistics.

May import `store` and `findings`.
"""

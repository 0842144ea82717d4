"""Packed row → a part of it on each of several ranks, whose attention sees the whole row.

Its files may import `loading`, and what that may import.
"""

"""A model → the same model, whose targets move only in free singular directions (OSFT).

Files here import adaptations/base, and what it may import.
"""

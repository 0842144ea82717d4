"""Conversation → the chat template's text, with the message that each character came from.

May import `formats`.
"""

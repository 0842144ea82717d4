"""Raw record → `Question`: a prompt to answer, a text to label, a pair to embed.

May import `formats`, and the package's own modules.
"""

"""Images of a row → what stands for them in its text, and the arguments of a forward.

May import the package's own modules only; it lies below `tokenizing`, which asks for the text.
"""

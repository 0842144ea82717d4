"""Text that somebody else wrote → text that can be printed: it cannot control a terminal."""


def printable(text: str, keep: str = "") -> str:
    r"""Escape characters that do not print, but for those in `keep`.

    >>> print(printable("a\x1b[31m\u202e\n.jsonl"))
    a\x1b[31m\u202e\n.jsonl
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in keep else repr(sign)[1:-1] for sign in text)

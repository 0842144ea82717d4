"""Any value of a row in few words, for a message."""


def describe(value: object) -> str:
    """What a JSON value is, in few words, for a message.

    >>> describe([1, 2]), describe("hi"), describe(None)
    ('a list of 2', "the string 'hi'", 'null')
    """
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f"the string {value[:40] + '…' if len(value) > 40 else value!r}"
        case dict():
            return f"an object with {', '.join(map(repr, value)) or 'no fields'}"
        case list() | tuple():
            return f"a list of {len(value)}"
        case _:
            return f"{type(value).__name__} {str(value)[:40]}"

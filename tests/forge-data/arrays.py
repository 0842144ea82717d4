"""The bytes of a store's arrays, to compare two stores."""


def arrays_of(store, without=()):
    """Return the bytes of every array by file name."""
    return {path.name: path.read_bytes() for path in sorted(store.path.glob("*.bin")) if path.name not in without}

"""Program that `forge serve` starts: transformers' server, as OpenAI's interface is."""

from __future__ import annotations

import signal
import sys


def run() -> None:
    """Serve by the words of this process.

    They are the name that was given, a system message, and the words of the command `transformers`.
    """
    from importlib.metadata import entry_points

    from forge.talking._served_generation import end_at_once
    from forge.talking._transformers_server import list_only, names_of, refuse_bad_requests

    given, system = sys.argv.pop(1), sys.argv.pop(1)
    list_only(sys.argv[2])
    refuse_bad_requests(names_of(sys.argv[2], given), system or None)
    end_at_once()
    # The command of the very transformers that is installed beside this package, wherever its scripts are.
    (script,) = entry_points(group="console_scripts", name="transformers")
    script.load()()


if __name__ == "__main__":
    # Until uvicorn has a handler of its own, a Ctrl-C is to end the imports and the loading without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    run()

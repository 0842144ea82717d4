"""Host and port → an open port there, waited for, or a sentence on why there is none."""

import socket
import time
from contextlib import closing

_RETRY_SECONDS = 0.5
# One attempt: a firewall that drops packets answers nothing, and a signal must be handled in between.
_ATTEMPT_SECONDS = 5.0


def unreachable(host: str, port: int, seconds: float) -> str:
    """Wait until something listens at HOST:PORT; "" once it does, else what the last attempt met after `seconds`.

    torch's own store retries too, but prints a C++ stack at every attempt, cannot be interrupted, and says of everything that it timed out.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            with closing(
                socket.create_connection((host, port), timeout=max(0.1, min(_ATTEMPT_SECONDS, end - time.monotonic())))
            ):
                return ""
        except socket.gaierror as error:
            last = f"the name {host} does not resolve here: {error.strerror}"
        except TimeoutError:
            last = "nothing answers"
        except OSError as error:
            last = error.strerror or str(error)
        if time.monotonic() + _RETRY_SECONDS >= end:
            return last
        time.sleep(_RETRY_SECONDS)

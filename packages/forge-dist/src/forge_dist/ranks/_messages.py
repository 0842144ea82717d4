"""Store of a run → messages of its ranks and launchers, signed with the run's secret.

torch's store asks nobody who he is: whoever reaches its port may list, read and write every key. So a message carries a code
(HMAC-SHA256) over its key and its text, and one that another program wrote counts as none. The secret is never sent. This keeps
others from speaking in a run's name; it hides nothing from them, and a key that they overwrite ends the run with an error.
"""

import hashlib
import hmac
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from forge_dist._errors import MeetingError

if TYPE_CHECKING:
    from torch.distributed import Store

Value = TypeVar("Value")

SECRET = "FORGE_RUN_SECRET"  # noqa: S105 - the name of the variable
"""Variable with a run's secret: given by the user, or by a launcher to its workers."""
_RUN_ID = "TORCHELASTIC_RUN_ID"
_DIGITS = 32
# How often a thread that waits for another one lets signals in.
_SIGNAL_SECONDS = 0.2
# torch warns on the terminal each time that a wait ran out.
_WAIT = timedelta(hours=1)


def run_secret(run_id: str) -> str:
    """Return the secret of this process's run: the environment's, else one from the run's name.

    Args:
        run_id: name of the run at its rendezvous; torchrun's own outranks it.

    """
    given = os.environ.get(SECRET, "").strip()
    return given or f"rdzv_id {os.environ.get(_RUN_ID, '').strip() or run_id}"


class Messages:
    """Signed messages over a store, under names that begin with `prefix`.

    Args:
        store: torch's; calls on it may be made by one thread at a time.
        secret: of the run, as text.
        prefix: of all keys.

    """

    def __init__(self, store: "Store", secret: str, prefix: str) -> None:
        from torch.distributed import PrefixStore

        self._secret, self._prefix = secret, prefix
        self.store: Store = PrefixStore(prefix, store)
        """The store itself, with the prefix, for what torch puts into it."""
        self.requests = 0
        """Requests that were sent to the store."""

    def over(self, store: "Store") -> "Messages":
        """Return messages of the same run and start over another store."""
        return Messages(store, self._secret, self._prefix)

    def set(self, key: str, text: str) -> None:
        """Write a message."""
        self.requests += 1
        self.store.set(key, self._signed(key, text))

    def claim(self, key: str, text: str) -> str | None:
        """Write a message where there is none of this run; return the one that is there, else None."""
        signed = self._signed(key, text)
        self.requests += 1
        found = self.store.compare_set(key, "", signed).decode(errors="replace")
        if found == signed:
            return None
        if (other := self._verified(key, found)) is None:
            self.set(key, text)  # what somebody else wrote must not keep a message of ours away
        return other

    def get(self, key: str) -> str:
        """Read a message; wait for it as long as the store does.

        Raises:
            MeetingError: what is there was not written by this run.
            DistError: nothing is there.
        """
        (text,) = self.read([key])
        return self._own(key, text)

    def read(self, keys: Sequence[str]) -> list[str | None]:
        """Read messages that are there, in two requests; None for one that this run did not write."""
        self.requests += 2  # torch asks first whether they are there
        found = self.store.multi_get(list(keys))
        return [self._verified(key, value.decode(errors="replace")) for key, value in zip(keys, found, strict=True)]

    def has(self, *keys: str) -> bool:
        """Return whether all of the keys have been written, by whomever."""
        self.requests += 1
        return self.store.check(list(keys))

    def count(self, key: str, more: int = 1) -> int:
        """Add to a counter and return it; a counter is not signed."""
        self.requests += 1
        return self.store.add(key, more)

    def receive(self, key: str) -> str:
        """Wait for a message, for hours if need be, and read it.

        Two requests: one before it is there, and one after. By a thread, as `wait`.

        Raises:
            MeetingError: what is there was not written by this run.
            DistError: the store's host is gone.
        """
        from torch.distributed import DistStoreError

        def receive() -> bytes:
            usual = self.store.timeout  # pyrefly: ignore[missing-attribute]  which torch's stub of Store leaves out
            self.store.set_timeout(_WAIT)
            try:
                while True:
                    self.requests += 2  # torch waits first until it is there
                    try:
                        return self.store.get(key)
                    except DistStoreError:
                        continue
            finally:
                self.store.set_timeout(usual)

        return self._own(key, self._verified(key, _in_thread(receive).decode(errors="replace")))

    def wait(self, key: str, seconds: float | None = None) -> None:
        """Wait for a key, for hours if need be: one request, which the store answers in the end.

        By a thread, so that signals reach the caller; until it is there the store's connection is taken.

        Args:
            key: of a message.
            seconds: limit of the wait; None without.

        Raises:
            DistError: the store's host is gone, or the time is over.
        """
        from torch.distributed import DistStoreError

        def wait() -> None:
            while True:
                self.requests += 1
                try:
                    return self.store.wait([key], _WAIT if seconds is None else timedelta(seconds=seconds))
                except DistStoreError:
                    if seconds is not None:
                        raise

        _in_thread(wait)

    def _own(self, key: str, text: str | None) -> str:
        """Return the text of a message that this run wrote; raise MeetingError for another."""
        if text is None:
            raise MeetingError(
                f"what lies at the ranks' meeting place under {self._prefix}/{key} was not written by this run: another "
                f"program writes there, or {SECRET} is not the same for all of them"
            )
        return text

    def _signed(self, key: str, text: str) -> str:
        code = hmac.new(self._secret.encode(), f"{self._prefix}/{key}\0{text}".encode(), hashlib.sha256)
        return code.hexdigest()[:_DIGITS] + text

    def _verified(self, key: str, found: str) -> str | None:
        text = found[_DIGITS:]
        return text if hmac.compare_digest(found.encode(), self._signed(key, text).encode()) else None


def _in_thread(call: Callable[[], Value]) -> Value:
    """Return what a call returns that may take hours, in a thread: signals are let in."""
    found: list[Value] = []
    problems: list[Exception] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
            problems.append(error)
        done.set()

    threading.Thread(target=run, name="forge-wait", daemon=True).start()
    while not done.wait(_SIGNAL_SECONDS):
        pass
    if problems:
        raise problems[0]
    return found[0]

"""Messages of a run, which nobody else can write."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from forge_dist import MeetingError
from forge_dist.ranks import _messages
from forge_dist.ranks._messages import SECRET, Messages, run_secret


@pytest.fixture
def store():
    """A store of torch that listens on a free port."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def messages(store):
    return Messages(store, "secret", "forge/1")


def test_a_message_arrives(messages, store):
    """What one rank writes another one reads, whatever signs it holds; the secret itself is never sent."""
    messages.set("a", "ü\n\0")
    other = Messages(store, "secret", "forge/1")
    assert other.get("a") == "ü\n\0"
    assert other.read(["a", "a"]) == ["ü\n\0"] * 2
    assert other.has("a")
    assert not other.has("a", "b")
    assert b"secret" not in store.get("forge/1/a")


@pytest.mark.parametrize("forged", [b"", b"{}", b"0" * 32 + b"text", b"\xff\xfe\0", "ü".encode() * 40])
def test_a_message_of_somebody_else_is_none(messages, store, forged):
    """Whoever reaches the port may write any key; no rank takes it for another rank's word."""
    messages.set("a", "true")
    store.set("forge/1/a", forged)
    assert messages.read(["a"]) == [None]
    with pytest.raises(MeetingError, match="under forge/1/a was not written by this run.*FORGE_RUN_SECRET") as caught:
        messages.get("a")
    assert caught.value.exit_status == 1


def test_a_message_cannot_be_moved(messages, store):
    """A true message under another key, of another start or of another run is none."""
    messages.set("a", "true")
    signed = store.get("forge/1/a")
    store.set("forge/1/b", signed)
    store.set("forge/2/a", signed)
    assert messages.read(["b"]) == [None]
    assert Messages(store, "secret", "forge/2").read(["a"]) == [None]
    assert Messages(store, "other", "forge/1").read(["a"]) == [None]


def test_the_first_claim_counts(messages, store):
    """Of two ranks one is first, and the other learns what it wrote; what somebody else put there keeps nobody away."""
    assert messages.claim("failed", "one") is None
    assert messages.claim("failed", "two") == "one"
    assert messages.get("failed") == "one"
    store.set("forge/1/failed", "forged")
    assert messages.claim("failed", "three") is None
    assert messages.get("failed") == "three"


def test_a_wait_is_one_request(messages, store):
    """However long it takes: the store answers when the key is there, and nobody asks meanwhile."""
    client = Messages(dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False), "secret", "forge/1")
    threading.Timer(1.0, messages.set, ("late", "here")).start()
    client.wait("late")
    assert client.requests == 1
    assert client.get("late") == "here"


def test_receiving_is_one_request_before_and_one_after(messages, store):
    """The store answers when the message is there; its own limit of waits is what it was."""
    client = Messages(dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False), "secret", "forge/1")
    client.store.set_timeout(timedelta(seconds=0.1))
    threading.Timer(0.5, messages.set, ("late", "ü")).start()
    assert client.receive("late") == "ü"
    assert client.requests == 2
    assert client.store.timeout == timedelta(seconds=0.1)
    store.set("forge/1/a", "forged")
    with pytest.raises(MeetingError, match="under forge/1/a was not written by this run"):
        client.receive("a")


def test_a_wait_with_a_limit(messages):
    """It ends with the store's error, for its caller to name what did not come."""
    with pytest.raises(dist.DistStoreError):
        messages.wait("never", 0.1)


def test_a_wait_lets_signals_in(messages, store):
    """A rank that waits for hours obeys a signal at once, which a call to the store would not."""
    client = Messages(dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False), "secret", "forge/1")
    import signal

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            client.wait("never")
        assert time.monotonic() - began < 30
    finally:
        signal.signal(signal.SIGALRM, before)
        messages.set("never", "")


def test_a_wait_ends_with_the_store(messages, store, monkeypatch):
    """What the store raises reaches the caller, and not a thread that nobody looks at; a wait that ran out goes on."""
    ran_out = []

    def wait(*_):
        if not ran_out:
            ran_out.append(1)
            raise dist.DistStoreError("wait timeout")
        raise dist.DistNetworkError("closed")

    gone = {"wait": wait, "get": wait, "timeout": timedelta(1), "set_timeout": lambda *_: None}
    monkeypatch.setattr(messages, "store", type("Gone", (), gone)())
    for call in (messages.wait, messages.receive):
        with pytest.raises(dist.DistNetworkError, match="closed"):
            call("a")
        assert ran_out == [1]
        ran_out.clear()


def test_where_the_secret_comes_from(monkeypatch):
    """The variable, else torchrun's name of the run, else that of the settings; ranks of one run find the same."""
    for name in (SECRET, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert run_secret("one") == run_secret("one") != run_secret("two")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun's")
    assert run_secret("one") == run_secret("two")
    monkeypatch.setenv(SECRET, "given")
    assert run_secret("one") == "given"
    monkeypatch.setenv(SECRET, " ")
    assert "torchrun's" in run_secret("one")
    assert _messages.SECRET == "FORGE_RUN_SECRET"

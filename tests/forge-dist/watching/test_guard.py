"""Signals that a guard is told of: when it says that the first came, when the second is overdue."""

import signal
from types import SimpleNamespace

from forge_dist.watching import _guard


def test_a_first_signal_is_answered_once_and_a_second_has_an_end():
    """Native code answers no signal: its guard does within a second, once, and not where a second one came."""
    assert _guard.ANSWER_SECONDS < 1
    now = [0.0]
    signals = _guard._Signals()
    signals._clock = SimpleNamespace(tick=lambda: now[0])
    signals.take(bytes([signal.SIGCHLD]))
    now[0] = 60.0
    assert not signals.unanswered()
    signals.take(bytes([signal.SIGINT]))
    now[0] += _guard.ANSWER_SECONDS
    assert not signals.unanswered()
    now[0] += 0.5
    assert signals.unanswered()
    assert not signals.unanswered()
    assert not signals.overdue()
    signals.take(bytes([signal.SIGTERM]))
    assert signals.last == signal.SIGTERM
    now[0] += _guard.SIGNAL_SECONDS
    assert not signals.overdue()
    now[0] += 0.5
    assert signals.overdue()
    assert not signals.unanswered()


def test_a_signal_that_the_process_answered_is_not_answered_again():
    """A handler that has said what becomes of the run tells its guard, which then says nothing."""
    now = [0.0]
    signals = _guard._Signals()
    signals._clock = SimpleNamespace(tick=lambda: now[0])
    signals.take(bytes([signal.SIGINT, _guard.ANSWERED]))
    now[0] = 60.0
    assert not signals.unanswered()
    signals.take(bytes([signal.SIGINT]))
    now[0] += _guard.SIGNAL_SECONDS + 0.5
    assert signals.overdue()

"""Each test plans as a process of its own does: compiled code is used by those that plan many samples themselves."""

from forge_packing.dividing import _compile


def pytest_runtest_setup() -> None:
    _compile._seen.update(dict.fromkeys(_compile._seen, 0))

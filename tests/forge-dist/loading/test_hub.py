"""Names on the hub: asked for once, and not waited for."""

import time

import pytest

from forge_dist import ModelError, check_hub_name


def test_the_hub_has_five_seconds(monkeypatch):
    """A hub that never answers is not waited for; one that says no is quoted."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: time.sleep(60))
    with pytest.raises(ModelError, match=r"has not answered within 0\.2 s; give a local directory, set HF_HOME"):
        check_hub_name("org/model", seconds=0.2)

    def refuse(*_, **__):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(ModelError, match="cannot be reached .Name or service not known.; give a local directory, set HF_HOME"):
        check_hub_name("org/model")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    check_hub_name("org/model")


def test_what_lies_beside_a_missing_directory(monkeypatch, tmp_path):
    """At most five directories are named, and dots stand for the others; offline the message has what to do."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    monkeypatch.chdir(tmp_path)
    for number in range(6):
        with pytest.raises(ModelError, match="there is no such directory here") as caught:
            check_hub_name("runs/model")
        names = ", ".join(f"r{each}" for each in range(number))
        assert (f" (runs/ holds {names})" if number else "here, and the Hub's cache") in str(caught.value)
        assert "unset HF_HUB_OFFLINE" in str(caught.value)
        (tmp_path / "runs" / f"r{number}").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"\(runs/ holds r0, r1, r2, r3, r4, \.\.\.\)"):
        check_hub_name("runs/model")

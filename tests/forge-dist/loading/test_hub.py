"""Names on the hub: asked for once, and not waited for."""

import time

import pytest

from forge_dist import ModelError, check_hub_name


def test_the_hub_has_five_seconds(monkeypatch):
    """A hub that never answers is not waited for; one that says no is quoted."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: time.sleep(60))
    with pytest.raises(ModelError, match=r"has not answered within 0\.2 s"):
        check_hub_name("org/model", seconds=0.2)

    def refuse(*_, **__):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(ModelError, match="cannot be reached .Name or service not known"):
        check_hub_name("org/model")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    check_hub_name("org/model")

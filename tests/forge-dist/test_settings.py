"""The settings of this room."""

import attrs
import pytest

from forge_dist import CheckpointSettings, LaunchSettings, ModelSettings


def test_defaults():
    """By default the model is exported once, at the end."""
    settings = CheckpointSettings(ckpt_output_dir="out")
    assert (settings.save_samples, settings.checkpoint_at_epoch) == (0, False)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ModelSettings(model_path=3), "model_path"),
        (lambda: ModelSettings(model_path=" "), "model_path"),
        (lambda: CheckpointSettings(ckpt_output_dir=None), "ckpt_output_dir"),
        (lambda: CheckpointSettings(ckpt_output_dir=""), "ckpt_output_dir"),
        (lambda: CheckpointSettings(ckpt_output_dir="o", save_samples=-1), "save_samples"),
        (lambda: CheckpointSettings(ckpt_output_dir="o", save_samples=True), "save_samples"),
        (lambda: CheckpointSettings(ckpt_output_dir="o", save_samples=1.0), "save_samples"),
        (lambda: CheckpointSettings(ckpt_output_dir="o", checkpoint_at_epoch=1), "checkpoint_at_epoch"),
        (lambda: CheckpointSettings(ckpt_output_dir="o", checkpoint_at_epoch="yes"), "checkpoint_at_epoch"),
    ],
)
def test_a_wrong_value_is_refused_by_name(make, field):
    """A value of a wrong type or range raises, naming its field."""
    with pytest.raises((TypeError, ValueError), match=field):
        make()


def test_settings_do_not_change():
    """A settings object is frozen, and takes keywords only."""
    settings = ModelSettings(model_path="m")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        settings.model_path = "n"
    with pytest.raises(TypeError):
        ModelSettings("m")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nproc_per_node", 0),
        ("nproc_per_node", "all"),
        ("nproc_per_node", "-1"),
        ("nproc_per_node", 1025),
        ("nproc_per_node", "1025"),
        ("master_port", 0),
        ("master_port", 65536),
        ("nnodes", 0),
        ("nnodes", "2:"),
        ("nnodes", "a:b"),
    ],
)
def test_numbers_of_processes_that_are_none(name, value):
    """A number from 1, a known word or a range; anything else is refused by name."""
    with pytest.raises(ValueError, match=f"{name} must be"):
        LaunchSettings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nproc_per_node", "gpu"),
        ("nproc_per_node", "2"),
        ("nproc_per_node", 1024),
        ("nnodes", "1:4"),
        ("nnodes", 3),
        ("master_port", 65535),
    ],
)
def test_numbers_of_processes(name, value):
    """Words, numbers in text (as YAML and shells may have them) and ranges are taken as they are."""
    assert getattr(LaunchSettings(**{name: value}), name) == value

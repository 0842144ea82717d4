"""A copy of the model that is compared lies on the host: no device has to have room for it beside the optimizer."""

import attrs
import pytest
import torch

from forge_dist import StrategySettings, check_export, export_model, load_model
from forge_dist.strategies._torch import one_process
from forge_dist.verifying import _check, _reload
from forge_dist.verifying._streamed import Tensors, layers_of, streamed

CPU = torch.device("cpu")
IDS = torch.arange(3, 14)[None]


class Copies(Tensors):
    """Copies to a device that is the host too; `most` are the bytes that were there at once."""

    def fetch(self, tensors):
        for tensor in tensors:
            if id(tensor) not in self._on_host:
                self._on_host[id(tensor)] = tensor.data
                tensor.data = tensor.data.clone()
        Copies.most = max(Copies.most, sum(data.nbytes for data in self._on_host.values()))

    most = 0


@pytest.fixture
def counted(monkeypatch):
    Copies.most = 0
    monkeypatch.setattr("forge_dist.verifying._streamed.Tensors", Copies)


def places(model):
    return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def test_one_layer_at_a_time(counted, base):
    """The same logits to the bit; on the device are what is outside of the layers, and one layer; then all is where it was."""
    model = load_model(base, dtype=torch.float32, device="cpu")
    before = places(model)
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
        with streamed(model, CPU):
            found = model(input_ids=IDS, use_cache=False).logits
    assert torch.equal(found, expected)
    assert places(model) == before
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in layers_of(model)]
    assert len(layers) == model.config.num_hidden_layers
    whole = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert Copies.most == whole - sum(layers) + max(layers)


def test_an_error_puts_everything_back(counted, base):
    """A forward that fails in a layer leaves no tensor on the device."""
    model = load_model(base, dtype=torch.float32, device="cpu")
    before = places(model)
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), streamed(model, CPU):
        model(input_ids=IDS, use_cache=False)
    assert places(model) == before


@pytest.fixture
def elsewhere():
    """A strategy of one process for a device that is not the host, by name alone."""
    strategy = one_process(CPU)

    class Device:
        type = "other"

    strategy.device = Device()
    return strategy


@pytest.mark.parametrize(("divides", "name"), [(False, "single"), (True, "fsdp2"), (True, "hsdp"), (True, "zero3")])
def test_the_copy_is_on_the_host(elsewhere, monkeypatch, divides, name):
    """A whole copy is loaded by one process on the host; of a divided one each rank's shards are offloaded there."""
    strategy, made = elsewhere, []
    monkeypatch.setattr(_reload, "make_strategy", lambda s, *_, **how: made.append((s, how["device"])) or strategy)
    strategy.divides, strategy.name = divides, name
    strategy.settings = StrategySettings(strategy=name)
    loader = _reload._loader(strategy, quantized=False, adapter=False)
    if not divides:
        assert (loader.device, loader.name, made) == (CPU, "single", [])
    else:
        ((settings, device),) = made
        assert settings.cpu_offload is True
        assert attrs.evolve(settings, cpu_offload=False) == strategy.settings
        assert device is strategy.device
    assert _reload._loader(strategy, quantized=True, adapter=False) is strategy, "4 bits are made on the device"


def test_a_model_on_the_host_is_loaded_as_before():
    """Where the host is the device, the strategy itself loads the copy."""
    strategy = one_process(CPU)
    assert _reload._loader(strategy, quantized=False, adapter=False) is strategy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_check_of_a_device_s_model(counted, base, tmp_path, samples, monkeypatch, dtype):
    """The whole check, with a copy on the host that is computed layer by layer: the figures of the check on the host."""
    model = load_model(base, dtype=torch.float32, device="cpu")
    where = export_model(model, tmp_path / "out", dtype=dtype)
    expected = check_export(model, where, samples)
    assert Copies.most == 0
    streams = []

    def there(reloaded, usable, strategy):
        with streamed(reloaded, CPU):
            streams.append(1)
            return _check._score(reloaded, usable, CPU, reloaded=True)

    monkeypatch.setattr(_check, "_score_there", there)
    assert check_export(model, where, samples) == expected
    # With the weights of the files, and where those are rounded with the ones in memory too.
    assert len(streams) == (1 if dtype == torch.float32 else 2)
    assert Copies.most > 0


def test_a_host_without_room_is_said_before(base, monkeypatch):
    """Where the host would kill the process for the copy, it is not made; the error does not say that an export differs."""
    monkeypatch.setattr(_reload, "room_for", lambda size, *, sharing: False)
    model = load_model(base, dtype=torch.float32, device="cpu")
    with pytest.raises(MemoryError, match="its files hold the bits of the model in memory"):
        _reload._require_room(model, one_process(CPU))

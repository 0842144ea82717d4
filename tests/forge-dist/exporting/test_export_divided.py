"""What ranks write together is what one process writes, byte for byte, or an error on all of them."""

import copy
import json
import os
import re
import resource
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import forge_dist
from forge_dist import ExportError, export_model, load_model
from forge_dist.exporting import _safetensors_writer

from ...ranks import run_on_ranks
from ..divided import CPU, adapted, changed, files_of, ready, strategy_of, zero
from .test_layout import mixture


@pytest.fixture
def bases(save_base, tmp_path):
    """Paths of tiny models by architecture."""
    mixture().save_pretrained(tmp_path / "mixtral")
    return {name: save_base(name, name=name) for name in ("llama-tied", "qwen3", "gemma3")} | {
        "mixtral": str(tmp_path / "mixtral")
    }


def alone(path, directory, *, lora=False, dtype=None, size="5GB", **options):
    """The files of one process's export of the same model, whose weights are those that transformers or PEFT writes."""
    model = load_model(path, dtype=torch.float32, device="cpu")
    if lora:
        model = adapted(model)
    else:
        changed(model.parameters())
    found = files_of(export_model(model.train(), directory, dtype=dtype, **options))
    written = (model if dtype is None else model.to(dtype)).save_pretrained
    written(f"{directory}-plain", **({} if lora else {"max_shard_size": size}))
    expected = files_of(Path(f"{directory}-plain"))
    weights = [file for file in expected if "safetensors" in file]
    assert weights == [file for file in found if "safetensors" in file]
    assert [file for file in weights if found[file] != expected[file]] == []
    return found


def on_ranks(ranks, path, directory, names, kinds):
    """Export under each strategy, in each of the `kinds` (lora, dtype), while training goes on; returns which could not."""
    wrong = []
    for name in names:
        for lora, dtype in kinds:
            strategy = strategy_of(ranks, name, adapter=lora)
            wrapped, inner = ready(strategy, path, lora=lora)
            modes, config = [module.training for module in wrapped.modules()], copy.deepcopy(inner.config.to_dict())
            found = export_model(wrapped, Path(directory, f"{name}-{lora}-{dtype}"), dtype=dtype, strategy=strategy)
            assert found == Path(directory, f"{name}-{lora}-{dtype}")
            if [module.training for module in wrapped.modules()] != modes or inner.config.to_dict() != config:
                wrong.append((name, lora, dtype))
    return wrong


KINDS = [(False, None), (False, torch.bfloat16), (True, None), (True, torch.bfloat16)]


def adapter_config(files):
    """PEFT writes sets, in whatever order."""
    config = json.loads(files["adapter_config.json"])
    return config | {"target_modules": sorted(config["target_modules"])}


def compare(path, tmp_path, names, kinds, world_size):
    assert run_on_ranks(on_ranks, world_size, path, str(tmp_path), names, kinds) == [[]] * world_size
    for lora, dtype in kinds:
        expected = alone(path, tmp_path / f"alone-{lora}-{dtype}", lora=lora, dtype=dtype)
        for name in names:
            found = files_of(tmp_path / f"{name}-{lora}-{dtype}")
            assert found.keys() == expected.keys(), name
            assert [file for file in found if found[file] != expected[file] and file != "adapter_config.json"] == [], name
            if lora:
                assert adapter_config(found) == adapter_config(expected)


@pytest.mark.slow
def test_two_ranks_write_what_one_process_writes(bases, tmp_path):
    """Every file of a full model and of an adapter, kept in float32 and rounded, under ddp and fsdp2, tied weights once."""
    compare(bases["llama-tied"], tmp_path, ["ddp", "fsdp2"], KINDS, 2)


@pytest.mark.slow
def test_four_ranks_write_what_one_process_writes(bases, tmp_path):
    """The same where copies of the model are each divided, and where odd sizes leave ranks with unequal parts."""
    compare(bases["gemma3"], tmp_path, ["hsdp", "fsdp2"], KINDS[1:3], 4)


@pytest.mark.slow
@zero
def test_zero_writes_what_one_process_writes(bases, tmp_path):
    """The same under DeepSpeed, with divided optimizers and with divided weights."""
    compare(bases["llama-tied"], tmp_path, ["zero1", "zero3"], KINDS[1:3], 2)


def several(ranks, bases, directory, tokenizer):
    """Exports whose weights are converted, or come in several files; then one that fails, and one after it."""
    strategy = strategy_of(ranks, "fsdp2")
    size = _safetensors_writer.FILE_SIZE
    for architecture, path in bases.items():
        wrapped, _ = ready(strategy, path)
        export_model(wrapped, Path(directory, architecture), tokenizer=tokenizer, strategy=strategy)
        _safetensors_writer.FILE_SIZE = 8000
        export_model(wrapped, Path(directory, f"{architecture}-files"), strategy=strategy)
        _safetensors_writer.FILE_SIZE = size
    messages = {}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (100, 6000):
        if ranks.is_first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        messages[f"full {limit}"] = refused(export_model, wrapped, Path(directory, "full"), strategy=strategy)
        if ranks.is_first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    messages["exists"] = refused(export_model, wrapped, Path(directory, "mixtral"), strategy=strategy)
    messages["class"] = refused(export_model, torch.nn.Linear(2, 2), Path(directory, "class"), strategy=strategy)
    if ranks.is_first:
        strategy.whole = broken(strategy.whole)
    messages["bug"] = refused(export_model, wrapped, Path(directory, "bug"), strategy=strategy)
    if ranks.is_first:
        del strategy.whole
    export_model(wrapped, Path(directory, "after"), strategy=strategy)
    _safetensors_writer.FILE_SIZE = 8000
    # A disk that is full for the other rank alone, and one that keeps other bytes than it was given.
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
    messages["full elsewhere"] = refused(export_model, wrapped, Path(directory, "elsewhere"), strategy=strategy)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        real, os.fsync = os.fsync, forgetful
    messages["forgotten"] = refused(export_model, wrapped, Path(directory, "forgotten"), strategy=strategy)
    if ranks.rank == 1:
        os.fsync = real
    _safetensors_writer.FILE_SIZE = size
    return messages


def forgetful(descriptor):
    """Flip the last bit of a file where it should be made durable."""
    where = os.fstat(descriptor).st_size - 1
    with open(f"/proc/self/fd/{descriptor}", "r+b") as file:
        file.seek(where)
        last = file.read(1)[0]
        file.seek(where)
        file.write(bytes([last ^ 1]))


def refused(function, *args, **kwargs):
    """Class and message of the error."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def broken(whole):
    """A mistake of ours in the middle of writing, as another rank could not know."""

    def tensors(model, names):
        for number, (name, tensor) in enumerate(whole(model, names)):
            yield name, (None if tensor is None else torch.zeros(1, 2, 3)) if number == 3 else tensor

    return tensors


@pytest.fixture(scope="module")
def several_exports(tmp_path_factory, make_model, tokenizer):
    """What `several` did on two ranks: (directory of the exports, paths of the bases, what each rank reported)."""
    where = tmp_path_factory.mktemp("several")
    models = {"qwen3": make_model("qwen3"), "gemma3": make_model("gemma3"), "mixtral": mixture()}
    bases = {name: str(where / "bases" / name) for name in models}
    for name, model in models.items():
        model.save_pretrained(bases[name])
    (where / "exports").mkdir()
    return where, bases, run_on_ranks(several, 2, bases, str(where / "exports"), tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "mixtral"])
def test_every_architecture(several_exports, architecture, tmp_path, tokenizer):
    """Untied heads, other norms, and experts that lie together in memory, with a tokenizer: the same files."""
    where, bases, _ = several_exports
    expected = alone(bases[architecture], tmp_path / "alone", tokenizer=tokenizer)
    found = files_of(where / "exports" / architecture)
    assert found.keys() == expected.keys()
    assert [file for file in found if found[file] != expected[file]] == []
    assert "tokenizer.json" in found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_several_files(several_exports, tmp_path, monkeypatch, architecture):
    """A model above the size of a file comes in the files and with the index that transformers makes."""
    where, bases, _ = several_exports
    monkeypatch.setattr(_safetensors_writer, "FILE_SIZE", 8000)
    expected = alone(bases[architecture], tmp_path / "alone", size=8000)
    found = files_of(where / "exports" / f"{architecture}-files")
    assert len(found) > 4
    assert found.keys() == expected.keys()
    assert [file for file in found if found[file] != expected[file]] == []


@pytest.mark.slow
def test_several_files_of_experts(several_exports, tmp_path):
    """Transformers keeps experts that lie together in memory in one file; here a file is full when it is full. The tensors are
    the same.
    """
    where, bases, _ = several_exports
    alone(bases["mixtral"], tmp_path / "alone")
    expected = load_file(tmp_path / "alone" / "model.safetensors")
    folder = where / "exports" / "mixtral-files"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in expected.values())
    assert index["weight_map"].keys() == expected.keys()
    for name, file in index["weight_map"].items():
        assert (folder / file).stat().st_size < 10000
        assert torch.equal(load_file(folder / file)[name], expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("limit", [100, 6000])
def test_a_full_disk_is_reported_on_all_ranks(several_exports, limit):
    """When rank 0 cannot write, every rank raises the same error, and nothing is left."""
    where, _, reported = several_exports
    kind, message = reported[0][f"full {limit}"]
    assert kind == "ExportError"
    assert "full cannot be written" in message
    assert "ile too large" in message
    assert reported[1][f"full {limit}"] == reported[0][f"full {limit}"]
    assert not [path for path in (where / "exports").iterdir() if "full" in path.name]


@pytest.mark.slow
def test_refusals_are_reported_on_all_ranks(several_exports):
    """A directory that exists, a model of another class: on every rank, before anything is put together."""
    where, _, reported = several_exports
    for name, part in (("exists", "exists already"), ("class", "Linear is neither")):
        assert reported[0][name] == reported[1][name]
        assert reported[0][name][0] == "ExportError"
        assert part in reported[0][name][1]
    assert not (where / "exports" / "class").exists()


@pytest.mark.slow
def test_a_failure_in_the_middle_does_not_hang(several_exports):
    """Rank 0 stops in the middle of the tensors: all ranks hear why, nothing is left, and the next export works."""
    where, _, reported = several_exports
    assert reported[0]["bug"] == reported[1]["bug"]
    assert (
        "came with shape" in reported[0]["bug"][1]
        or "never came" in reported[0]["bug"][1]
        or "[1, 2, 3]" in reported[0]["bug"][1]
    )
    assert not [path for path in (where / "exports").iterdir() if "bug" in path.name]
    assert files_of(where / "exports" / "after").items() <= files_of(where / "exports" / "mixtral").items()
    assert "model.safetensors" in files_of(where / "exports" / "after")


@pytest.mark.slow
def test_the_other_rank_writes_its_files_and_is_read_back(several_exports):
    """Rank 1 writes files too: what it cannot write, or its disk does not keep, is an error on both, and nothing is left."""
    where, _, reported = several_exports
    assert "elsewhere cannot be written: " in reported[0]["full elsewhere"][1]
    assert "ile too large (rank 1)" in reported[0]["full elsewhere"][1]
    kind, message = reported[1]["forgotten"]
    assert reported[0]["forgotten"] == [kind, message]
    assert kind == "ExportError"
    assert re.search(r"model-0000\d-of-0000\d.safetensors does not hold what rank 1 wrote: rank 0 .* other bytes", message)
    assert not [path for path in (where / "exports").iterdir() if "elsewhere" in path.name or "forgotten" in path.name]


@pytest.fixture
def one():
    """The strategy of one rank."""
    with forge_dist.join(forge_dist.topology(forge_dist.LaunchSettings(), environ={})) as ranks:
        ranks.connect("gloo", CPU)
        yield strategy_of(ranks, "single")


@pytest.mark.parametrize(("architecture", "most"), [("qwen3", 2), ("mixtral", 6)])
def test_tensors_are_written_as_they_come(one, bases, tmp_path, architecture, most):
    """Of the tensors that were put together no more are held than the conversion of one layer's experts needs."""
    _, model = ready(one, bases[architecture])
    alive, peak = weakref.WeakSet(), 0

    def whole(model, names):
        nonlocal peak
        state = model.state_dict()
        for name in names:
            tensor = state[name].clone()
            alive.add(tensor)
            peak = max(peak, len(alive))
            yield name, tensor
            del tensor

    one.whole = whole
    export_model(model, tmp_path / "out", strategy=one)
    assert len(model.state_dict()) > 15
    assert 1 <= peak <= most
    assert files_of(tmp_path / "out") == alone(bases[architecture], tmp_path / "alone")


def test_a_strategy_of_one_is_no_strategy(one, bases, tmp_path):
    """With strategy=single an export is that of a model that no strategy loaded."""
    _, model = ready(one, bases["qwen3"])
    assert files_of(export_model(model, tmp_path / "out", strategy=one)) == alone(bases["qwen3"], tmp_path / "alone")


def test_a_tensor_that_never_comes_is_missed(one, bases, tmp_path):
    """If a tensor is left out while the model is put together, nothing is left under the name."""
    _, model = ready(one, bases["qwen3"])
    whole = one.whole
    one.whole = lambda model, names: (item for item in whole(model, names) if item[0] != "model.norm.weight")
    with pytest.raises(ExportError, match=r"the tensor model\.norm\.weight never came"):
        export_model(model, tmp_path / "out", strategy=one)
    assert not (tmp_path / "out").exists()
    assert load_file(Path(bases["qwen3"], "model.safetensors"))

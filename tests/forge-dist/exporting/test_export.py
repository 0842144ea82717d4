"""A model in memory into a directory that plain transformers loads."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from forge_dist import ExportError, export_model, load_model


def trained(path, **options):
    """The model of `path` after something like a training step."""
    model = load_model(path, **({"dtype": torch.float32, "device": "cpu"} | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.ones_like(parameter))
    return model


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_is_bit_equal(save_base, architecture, tmp_path, dtype):
    """Plain from_pretrained reads every tensor back as it was, rounded once to the export's type."""
    model = trained(save_base(architecture))
    directory = export_model(model, tmp_path / "out", dtype=dtype)
    back, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values())
    assert type(back) is type(model)
    assert back.dtype == (dtype or torch.float32)
    assert back.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.to(dtype or torch.float32)), name


def test_the_keys_are_those_of_the_base(save_base, architecture, tmp_path):
    """The files name the same tensors as the directory that training started from: tied weights once."""
    path = save_base(architecture)
    directory = export_model(trained(path), tmp_path / "out")
    assert load_file(directory / "model.safetensors").keys() == load_file(Path(path) / "model.safetensors").keys()
    if architecture == "llama-tied":
        assert "lm_head.weight" not in load_file(directory / "model.safetensors")


def test_the_configuration_is_that_of_the_base(save_base, architecture, tmp_path):
    """config.json says what the base's said, and the top-level rope_theta that readers older than transformers 5 look for."""
    path = save_base(architecture)
    directory = export_model(trained(path), tmp_path / "out")
    before, after = (json.loads((Path(where) / "config.json").read_text()) for where in (path, directory))
    added = {key: after.pop(key) for key in set(after) - set(before)}
    assert after == before
    assert added == ({} if architecture == "gemma3" else {"rope_theta": before["rope_parameters"]["rope_theta"]})
    assert AutoModelForCausalLM.from_pretrained(directory).config.rope_parameters == before["rope_parameters"]


def test_nothing_private_travels(base, tmp_path, tokenizer, documents):
    """No file names our attention function, this machine's folders, or the cache that training had switched off."""
    model = trained(base, attention="our_documents", attention_function=documents)
    model.config.use_cache = model.generation_config.use_cache = False
    model.config.base_model_name_or_path = str(tmp_path)  # converters leave such keys behind
    directory = export_model(model, tmp_path / "out", tokenizer=tokenizer, dtype=torch.bfloat16)
    for file in directory.iterdir():
        text = file.read_bytes().decode("utf-8", errors="replace")
        for private in ("our_documents", str(tmp_path), "name_or_path"):
            assert private not in text, f"{file.name} holds {private}"
    config = json.loads((directory / "config.json").read_text())
    assert config["use_cache"] is True
    assert config["dtype"] == "bfloat16"
    assert GenerationConfig.from_pretrained(directory).use_cache is not False
    assert model.config.use_cache is model.generation_config.use_cache is False


def test_the_model_in_memory_goes_on(base, tmp_path, documents, state_of):
    """After an export the model has the same bits, the same configuration objects, attention and mode, and still trains."""
    model = trained(base, attention="our_documents", attention_function=documents).train()
    before, config, generation = state_of(model), model.config, model.generation_config
    message = config.to_dict(), generation.to_dict()
    export_model(model, tmp_path / "out", dtype=torch.bfloat16)
    assert model.config is config
    assert model.model.config is config
    assert model.generation_config is generation
    assert (config.to_dict(), generation.to_dict()) == message
    assert config._attn_implementation == "our_documents"
    assert model.training
    for name, tensor in before.items():
        assert model.state_dict()[name].dtype == torch.float32
        assert torch.equal(model.state_dict()[name], tensor)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


def test_a_configuration_in_memory_is_not_written_to(make_model, tmp_path):
    """save_pretrained sets architectures and dtype on the configuration that it finds; that is a copy."""
    model = make_model("qwen3")
    model.config.dtype = None
    assert model.config.architectures is None
    directory = export_model(model, tmp_path / "out", dtype=torch.bfloat16)
    assert (model.config.architectures, model.config.dtype) == (None, None)
    message = json.loads((directory / "config.json").read_text())
    assert (message["architectures"], message["dtype"]) == (["Qwen3ForCausalLM"], "bfloat16")


def test_tokenizer_and_template_travel(base, tmp_path, tokenizer):
    """The tokenizer that comes back encodes the same, with the same chat template."""
    directory = export_model(trained(base), tmp_path / "out", tokenizer=tokenizer)
    back = AutoTokenizer.from_pretrained(directory)
    assert back.chat_template == tokenizer.chat_template
    assert back("a b c").input_ids == tokenizer("a b c").input_ids
    assert (back.eos_token, back.pad_token) == ("<eos>", "<pad>")


@pytest.mark.parametrize("settings", [{"max_new_tokens": 7, "eos_token_id": [1, 2]}, {"temperature": 0.3, "top_p": 0.5}])
def test_the_generation_configuration_travels(base, tmp_path, settings):
    """What the base says about generating is said again, even what transformers only warns about (temperature without
    do_sample).
    """
    model = trained(base)
    for key, value in settings.items():
        setattr(model.generation_config, key, value)
    directory = export_model(model, tmp_path / "out")
    message = json.loads((directory / "generation_config.json").read_text())
    assert {key: message[key] for key in settings} == settings


def test_everyone_may_read_it(base, tmp_path, tokenizer):
    """Files have the mode that the umask gives, not safetensors' 0600."""
    before = os.umask(0o022)
    try:
        directory = export_model(trained(base), tmp_path / "out", tokenizer=tokenizer)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in directory.iterdir()} == {0o644}
    assert directory.stat().st_mode & 0o777 == 0o755


def test_an_existing_directory_is_not_touched(base, tmp_path):
    """A second export under the same name is refused, and the first stays."""
    model = trained(base)
    directory = export_model(model, tmp_path / "out")
    first = (directory / "model.safetensors").read_bytes()
    with pytest.raises(ExportError, match="exists already"):
        export_model(trained(base), directory)
    assert (directory / "model.safetensors").read_bytes() == first


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_type_that_is_none_is_refused(base, tmp_path, dtype):
    """Weights are written in a float type of 16 bits or more."""
    with pytest.raises(ExportError, match=r"cannot be exported; known: .*bfloat16"):
        export_model(trained(base), tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_another_class_is_refused(tmp_path):
    """What is no transformers model is refused by its class, and nothing is left."""
    with pytest.raises(ExportError, match="Linear is neither"):
        export_model(torch.nn.Linear(2, 2), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_quantized_weights_are_refused(base, tmp_path):
    """A quantized model's weights are not what was trained."""
    model = trained(base)
    model.hf_quantizer = object()
    with pytest.raises(ExportError, match="quantized"):
        export_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_named(base, tmp_path):
    """The error names the directory that was wanted."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="file/out cannot be written"):
        export_model(trained(base), tmp_path / "file" / "out")


@pytest.mark.parametrize("limit", [100, 6_000])
def test_a_disk_that_refuses_leaves_nothing(base, tmp_path, limit):
    """When writing fails, in the configuration or in the weights, the error names the directory and nothing is left of it."""
    model = trained(base)
    where = tmp_path / "exports"
    where.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(ExportError, match=r"exports/out cannot be written: .*[Ff]ile too large"):
            export_model(model, where / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(where.iterdir()) == []
    export_model(model, where / "out")


def test_a_full_disk_is_said_with_both_figures(base, tmp_path, monkeypatch):
    """How much the tensors take and how much is free, once what was half-written is gone."""
    model = trained(base)
    takes = sum(each.nbytes for each in load_file(export_model(model, tmp_path / "whole") / "model.safetensors").values())
    fsync = os.fsync

    def full(descriptor):
        if "/.out." in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    said = (
        rf"out cannot be written: .*No space left on device; it takes {takes / 2**10:.1f} KiB, and [\d,.]+ MiB are free there$"
    )
    with pytest.raises(ExportError, match=said) as caught:
        export_model(model, tmp_path / "out")
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert not (tmp_path / "out").exists()


def test_big_models_come_in_several_files(base, tmp_path, monkeypatch):
    """Above the size of a file the weights are split, with an index, and load back the same."""
    model = trained(base)
    monkeypatch.setattr("forge_dist.exporting._safetensors_writer.FILE_SIZE", 8000)
    directory = export_model(model, tmp_path / "out", dtype=torch.bfloat16)
    assert (directory / "model.safetensors.index.json").is_file()
    back = AutoModelForCausalLM.from_pretrained(directory)
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.to(torch.bfloat16))


KILLS = """
import json, os, pathlib, signal, sys, time
import torch
from forge_dist import export_model, load_model

base, into = sys.argv[1], pathlib.Path(sys.argv[2])
model = load_model(base, dtype=torch.float32, device="cpu")


def killed(name, stop, delay):
    # A child that exports, and dies where it calls `stop`, or after `delay` seconds.
    child = os.fork()
    if not child:
        if stop is not None:
            stop(lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
        export_model(model, into / name)
        os._exit(0)
    if stop is None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def before_the_weights(die):
    import forge_dist.exporting._export as place
    place.SafetensorsWriter.write = die


def after_the_weights(die):
    import forge_dist.exporting._export as place
    place.set_permissions = die


def before_the_rename(die):
    import forge_dist._files as place
    place._refuse_existing = lambda target: die() if any(into.glob(f".{target.name}.*/model.safetensors")) else None


export_model(model, into / "first")  # with it come imports, which the children need not make again
began = time.perf_counter()
export_model(model, into / "whole")
one = time.perf_counter() - began
stops = (before_the_weights, after_the_weights, before_the_rename)
phases = {stop.__name__: killed(stop.__name__, stop, None) for stop in stops}
statuses = [killed(f"timed{i}", None, 1.3 * one * i / 30) for i in range(30)]
print(json.dumps([phases, statuses]))
"""


@pytest.mark.slow
def test_a_kill_leaves_no_half_directory(base, tmp_path):
    """SIGKILL in each phase of an export, and at thirty moments of it: under each name nothing, or a
    directory that is whole.
    """
    where = tmp_path / "exports"
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KILLS, base, str(where)], capture_output=True, text=True, env=environ, check=True
    )
    phases, statuses = json.loads(done.stdout.splitlines()[-1])
    assert set(phases.values()) == {-signal.SIGKILL}
    for phase in phases:
        assert not (where / phase).exists()
        assert list(where.glob(f".{phase}.*/config.json")), "the export had begun"
    assert statuses.count(-signal.SIGKILL) >= 10
    expected = load_file(where / "whole" / "model.safetensors")
    names = sorted(path.name for path in (where / "whole").iterdir())
    for i, status in enumerate(statuses):
        directory = where / f"timed{i}"
        assert directory.exists() or status == -signal.SIGKILL
        if directory.exists():
            assert sorted(path.name for path in directory.iterdir()) == names
            found = load_file(directory / "model.safetensors")
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

"""What training can start from, checked in milliseconds."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from forge_dist import ModelError, check_model, check_model_path, has_no_weights


def test_a_whole_directory_passes(save_base, architecture):
    """A directory as transformers writes it is fine, for every architecture."""
    check_model_path(save_base(architecture))


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M-Instruct", "a/b", "meta-llama/Llama-3.2-1B"])
def test_a_hub_name_is_left_to_the_loader(name):
    """org/name is accepted with no network."""
    check_model_path(name)


@pytest.mark.parametrize(
    "name", ["gpt2", "", "no/such/folder", "/no/such", "./model", "../a", "org/", "a b/c", "~/no-such-model"]
)
def test_neither_path_nor_name(name, tmp_path, monkeypatch):
    """Anything else says what was looked for, and where."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelError, match="neither a directory here nor a name") as caught:
        check_model_path(name)
    assert str(Path.cwd()) in str(caught.value)


def refuse(self, *args, **kwargs):
    """What the system answers whoever may not (these tests may run as root, who may everything)."""
    raise PermissionError(errno.EACCES, "Permission denied", str(self))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("m" * 300, "File name too long"), ("a\0b", "null"), ("~no-such-user/m", "home directory"), ("loop/m", "symbolic links")],
)
def test_a_path_that_cannot_be_looked_up(tmp_path, monkeypatch, name, reason):
    """A name that no file can have, an unknown user or a loop of links: the error says which path, and why."""
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(ModelError, match=f"cannot be looked up: .*{reason}") as caught:
        check_model_path(name)
    assert repr(name) in str(caught.value)


def test_a_path_in_a_closed_directory(base, monkeypatch):
    """A directory on the way that may not be entered is no absent model."""
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ModelError, match=f"{base}' cannot be looked up: Permission denied"):
        check_model_path(base)


@pytest.mark.parametrize(
    ("method", "file"), [("forge_dist._safetensors.open", "model.safetensors"), ("pathlib.Path.read_text", "config.json")]
)
def test_files_that_may_not_be_read_are_not_broken(base, monkeypatch, method, file):
    """No permission is called that, and the file is named."""
    monkeypatch.setattr(method, refuse, raising=False)
    with pytest.raises(ModelError, match=f"may not be read: .*Permission denied: .*{file}") as caught:
        check_model_path(base)
    assert "broken" not in str(caught.value)


def test_a_closed_model_directory(base, monkeypatch):
    """A model directory that may be seen and not entered says so."""
    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(ModelError, match=f"model_path {base} may not be read: .*Permission denied"):
        check_model_path(base)


def test_a_home_directory_is_expanded(base, monkeypatch):
    """`~` is the home directory, as in a shell."""
    monkeypatch.setenv("HOME", str(Path(base).parent))
    check_model_path("~/base")


@pytest.mark.parametrize(("name", "remedy"), [("model.gguf", "gguf_file="), ("model.safetensors", "must be a directory")])
def test_a_file_is_refused(tmp_path, name, remedy):
    """A file is no model directory; of a GGUF file the message says how it becomes one."""
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=remedy):
        check_model_path(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"peft_type": "OFT"}', "OFT "),
        ('{"peft_type": "LORA"}', "LORA "),
        ("{}", ""),
        ("[]", ""),
        ('{"peft_type": "a{b}"}', ""),
    ],
)
def test_an_adapter_is_refused_with_the_way_to_merge_it(base, text, kind):
    """A directory with an adapter is not trained on from, even if a model lies beside it; its kind is named."""
    (Path(base) / "adapter_config.json").write_text(text)
    said = f"is an adapter.*forge export RUN --merge.*merge_and_unload.* To train this {kind}adapter further, give its base"
    with pytest.raises(ModelError, match=said):
        check_model_path(base)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda d: (d / "config.json").unlink(), r"has no config\.json"),
        (lambda d: (d / "config.json").write_text("{"), r"config\.json cannot be read as JSON"),
        (lambda d: (d / "config.json").write_bytes(b"\xff\xfe"), r"config\.json cannot be read as JSON"),
        (lambda d: (d / "config.json").write_text("[1]"), "must hold a JSON object; found list"),
        (lambda d: (d / "model.safetensors").unlink(), "no complete weights: .*; fetch them \\(a dry run for another machine"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "broken weights"),
        (lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-1]), "broken weights"),
        (lambda d: (d / "model.safetensors").rename(d / "consolidated.safetensors"), "reads only those two names"),
        (lambda d: (d / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}"), "hold no tensor"),
    ],
)
def test_a_broken_directory_is_refused(base, break_it, message):
    """Each way in which a directory can be incomplete is distinguished, and the directory named."""
    break_it(Path(base))
    with pytest.raises(ModelError, match=message) as caught:
        check_model_path(base)
    assert base in str(caught.value)


def test_a_configuration_alone_passes_where_weights_need_not_be_here(base):
    """Its shapes are known; files of another kind are no directory without weights."""
    assert not has_no_weights(base)
    (Path(base) / "model.safetensors").unlink()
    assert has_no_weights(base)
    assert not has_no_weights("org/name")
    check_model_path(base, weights=False)
    rows = json.loads((Path(base) / "config.json").read_text())["vocab_size"]
    assert check_model(base, weights=False) == rows
    with pytest.raises(ModelError, match="no complete weights"):
        check_model(base)
    (Path(base) / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickles can run code"):
        check_model_path(base, weights=False)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_way_to_convert_them(base, name):
    """Where only pickles are, they are not read; the message says why and how to convert."""
    (Path(base) / "model.safetensors").rename(Path(base) / name)
    with pytest.raises(ModelError, match="pickles can run code.*save_pretrained"):
        check_model_path(base)


def test_a_folder_of_gguf_is_refused_with_the_way_to_convert_it(tmp_path):
    """A folder with a GGUF file and no config.json says how to make a model directory of it."""
    (tmp_path / "model.Q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="gguf_file="):
        check_model_path(str(tmp_path))


@pytest.mark.parametrize("inside", ["merged", "snapshots/3f2a"])
def test_a_folder_of_models_names_one(tmp_path, inside):
    """A folder of exports, or of the Hub's cache, says where a model lies in it."""
    (tmp_path / inside).mkdir(parents=True)
    (tmp_path / inside / "config.json").touch()
    with pytest.raises(ModelError, match=f"it has no config.json; {tmp_path / inside} has one$"):
        check_model_path(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "no causal language model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no causal language model"),
        ({"architectures": ["LlamaModel"]}, "no causal language model"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "with the configurations of its parts"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": None}, "no model_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
    ],
)
def test_another_kind_of_model_is_refused(base, edit_config, changes, message):
    """What is no unquantized causal language model is refused by its config.json."""
    edit_config(base, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        check_model_path(base)
    assert "config.json" in str(caught.value)


def test_a_directory_without_architectures_is_left_to_the_loader(base, edit_config):
    """A config.json may leave the class out; its model_type decides when it is loaded."""
    edit_config(base, architectures=None)
    check_model_path(base)


def test_a_directory_wins_over_a_hub_name(base, monkeypatch):
    """org/name that is a directory here is that directory, and is checked as one."""
    monkeypatch.chdir(Path(base).parent)
    shutil.copytree("base", "org/name")
    check_model_path("org/name")
    Path("org/name/config.json").unlink()
    with pytest.raises(ModelError, match="no config"):
        check_model_path("org/name")

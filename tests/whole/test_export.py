"""`forge.export`: a run → a directory to hand on, or a refusal that says why and leaves nothing."""

from __future__ import annotations

import errno
import json
import re
import shutil
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import forge
import forge_dist
from forge._redact import last_part, redact
from forge.cli._app import main
from forge.exporting import _request

from .limits import largest_file

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def trained(path: Path, model_dir: Path, chats: Path, **settings: Any) -> Path:
    """The directory of a short run."""
    short = {"max_steps": 3, "effective_batch_size": 4, "learning_rate": 1e-2, "validation_split": 0.25, "logging_steps": 100}
    given = short | {"model_path": str(model_dir), "data_path": str(chats), "ckpt_output_dir": str(path), "device": "cpu"}
    return forge.sft(**given | settings).output_dir


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, chats: Path) -> Path:
    """A run of an adapter."""
    return trained(tmp_path_factory.mktemp("export") / "lora", model_dir, chats, adapter="lora", lora_r=4)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, chats: Path) -> Path:
    """A run of all weights."""
    return trained(tmp_path_factory.mktemp("export") / "full", model_dir, chats)


def logits(model: Any) -> torch.Tensor:
    """Logits of one row, float32."""
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 40)[None]).logits


@pytest.mark.slow
def test_a_merged_run_is_the_adapter_beside_its_base(lora: Path, model_dir: Path, tmp_path: Path) -> None:
    """Plain transformers loads a model of the same logits, with tokenizer and template; training may start from it."""
    from peft import PeftModel

    adapter = next(lora.glob("hf_format/samples_*"))
    beside = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), adapter)
    path = forge.export(lora, merge=True)
    assert path == lora / "exports" / f"{adapter.name}-float32-merged"
    merged = AutoModelForCausalLM.from_pretrained(path)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    torch.testing.assert_close(logits(merged), logits(beside), rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(path).chat_template == AutoTokenizer.from_pretrained(model_dir).chat_template
    assert (path / "generation_config.json").is_file()
    forge.dist.check_model_path(str(path))
    assert forge.generate(path, "what colour has the plum?", max_new_tokens=4) == forge.generate(
        lora, "what colour has the plum?", max_new_tokens=4
    )
    # Again, elsewhere and in half the bytes.
    half = forge.export(adapter, tmp_path / "half", merge=True, dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(half).dtype == torch.bfloat16


@pytest.mark.slow
def test_a_whole_run_as_gguf(full: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file that transformers reads too, with the logits of the run's own export."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    path = forge.export(full, format="gguf")
    assert path.name == f"{model_dir.name}-sft-float32.gguf"
    said = [line.partition(path.name)[0] for line in capsys.readouterr().err.splitlines() if line.endswith("...")]
    assert said[-4:] == ["writing ", "reading ", "loading ", "comparing the logits of "], "each stage has its line"
    expected = AutoModelForCausalLM.from_pretrained(next(full.glob("hf_format/samples_*")))
    found = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=str(path), dtype=torch.float32)
    torch.testing.assert_close(logits(found), logits(expected), rtol=1e-5, atol=1e-5)
    assert f"llama-cli -m {path.name}" in (path.parent / "README.md").read_text()


def test_an_adapter_as_it_is(lora: Path, tmp_path: Path) -> None:
    """Without a merge an adapter stays one, in the requested type, with its card."""
    from safetensors.torch import load_file

    path = forge.export(lora, tmp_path / "adapter", dtype="float16")
    assert {tensor.dtype for tensor in load_file(path / "adapter_model.safetensors").values()} == {torch.float16}
    assert json.loads((path / "adapter_config.json").read_text())["r"] == 4
    assert "PeftModel.from_pretrained" in (path / "README.md").read_text()


def test_the_card_says_what_the_run_was(lora: Path, model_dir: Path, tmp_path: Path) -> None:
    """Settings that were given, rows and fingerprint of the data, losses first and last, versions; no path of this machine."""
    card = (forge.export(lora, tmp_path / "merged", merge=True) / "README.md").read_text()
    store = json.loads((lora / "data" / "train" / "store.json").read_text())
    lines = [json.loads(line) for line in (lora / "metrics.jsonl").read_text().splitlines()]
    held = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert f"| eval_loss | {held[0]:.4f} | {held[-1]:.4f} |" in card
    assert store["fingerprint"] in card
    assert "24 rows read, 24 kept" in card
    assert "| lora_r | 4 | argument |" in card
    assert "weight_decay" not in card  # a default
    assert f"torch {version('torch')}" in card
    for private in (model_dir, lora, tmp_path):
        assert str(private) not in card
        assert str(private.parent) not in card
    assert not re.search(r"(?<![\w.])/\w+/\w+", card)


def test_the_command_prints_where_it_lies(lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`forge export RUN --merge --output DIR`: one line, the directory."""
    assert main(["export", str(lora), "--merge", "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"


@pytest.mark.parametrize(
    ("of", "settings", "match"),
    [
        ("full", {"merge": True}, "merge has no effect"),
        ("lora", {"format": "gguf"}, "a GGUF file a whole model: set merge"),
        ("lora", {"format": "onnx"}, "format='onnx' is not one of hf, gguf"),
        ("lora", {"dtype": "int3"}, "dtype='int3' is not one of"),
        ("full", {"dtype": "q8_0"}, "set format=gguf"),
        ("nowhere", {}, "neither a run directory nor"),
    ],
)
def test_what_makes_no_sense_is_refused(
    of: str, settings: dict[str, Any], match: str, lora: Path, full: Path, tmp_path: Path
) -> None:
    """Refused by name, before anything is loaded, and nothing is written."""
    run = {"lora": lora, "full": full, "nowhere": tmp_path / "nowhere"}[of]
    with pytest.raises(forge.SettingsError, match=match):
        forge.export(run, tmp_path / "out", **settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["--merge"], "--merge has no effect: "),
        (["--dtype", "q8_0"], "--dtype q8_0 is a type of GGUF files: set --format gguf, or --dtype float32, "),
        (["--output", ""], "--output is empty: "),
        (["--output", "."], "--output "),
        (
            ["--format", "gguf", "--output", "gone/x.gguf"],
            "--output gone/x.gguf is the name of a file, and output a directory, in which the file is written under a name of "
            "its own, with a model card: give a directory, such as gone/x.\n",
        ),
        (["--output", "gone/x.GGUF"], "--output gone/x.GGUF is the name of a file"),
    ],
)
def test_errors_of_the_command_name_flags(
    words: list[str],
    printed: str,
    full: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not the arguments of the Python function."""
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(full), *words]) == 2
    assert f"forge: {printed}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "printed"),
    [(["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"), (["--temperature", "-1"], "--temperature must be 0")],
)
def test_errors_of_generate_name_flags(words: list[str], printed: str, full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and one line."""
    assert main(["generate", str(full), "what colour has the plum?", *words]) == 2
    assert capsys.readouterr().err.startswith(f"forge: {printed}")


def test_where_to_write_is_asked_for(full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model directory needs an output; an existing one is not overwritten: status 2."""
    with pytest.raises(forge.SettingsError, match="output is required"):
        forge.export(next(full.glob("hf_format/samples_*")))
    (tmp_path / "out").mkdir()
    assert main(["export", str(full), "--output", str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_an_existing_target_is_refused_at_once(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the files of the run are read and transformers is loaded."""

    def slow(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(_request, "refuse_damaged_export", slow)
    monkeypatch.setattr(forge.dist, "directory_task", slow)
    with pytest.raises(forge.RunDirectoryError, match="exists already"):
        forge.export(full, tmp_path)


@pytest.mark.slow
def test_another_base_is_refused(tmp_path: Path, model_dir: Path, chats: Path) -> None:
    """A run whose base changed since is not merged, even where only run.json shows it."""
    from safetensors.torch import load_file, save_file

    base = shutil.copytree(model_dir, tmp_path / "base")
    run = trained(tmp_path / "run", base, chats, adapter="lora", max_steps=1)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    # As an export that has no hashes, which are of today's runs.
    next(run.glob("hf_format/*/forge_base.json")).unlink()
    (run / "hf_format" / "hashes.json").unlink()
    (run / "events.jsonl").unlink()
    with pytest.raises(forge.SettingsError, match="not the one that this run began with"):
        forge.export(run, merge=True)
    assert not (run / "exports").exists()


def test_four_bits_need_a_type(tmp_path: Path, lora: Path) -> None:
    """Merging an adapter that was trained beside a quantized base is refused without the dtype of what comes out."""
    adapter = shutil.copytree(next(lora.glob("hf_format/samples_*")), tmp_path / "adapter")
    note = json.loads((adapter / "forge_base.json").read_text())
    (adapter / "forge_base.json").write_text(json.dumps(note | {"quantization": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(forge.SettingsError, match="beside a base in 4 or 8 bits.*give the dtype"):
        forge.export(adapter, tmp_path / "out", merge=True)


def test_a_second_export_is_refused_at_its_start(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process writes to the same place; it worked to the end before. Nothing of it is left."""

    def slow(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(_request, "refuse_damaged_export", slow)
    monkeypatch.setattr(forge.dist, "directory_task", slow)
    with (
        forge.dist.atomic_directory(tmp_path / "out"),
        pytest.raises(forge.dist.ExportError, match="is being written by another process now"),
    ):
        forge.export(full, tmp_path / "out")
    with pytest.raises(AssertionError):
        forge.export(full, tmp_path / "new" / "other")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_failed_export_leaves_nothing(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that does not read back the same leaves no directory."""

    def fails(*_: object, **__: object) -> None:
        raise forge.dist.ExportError("not the same")

    monkeypatch.setattr(forge.dist, "check_export", fails)
    with pytest.raises(forge.dist.ExportError, match="not the same"):
        forge.export(full, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("config.yaml", None, "config.yaml: cannot be read"),
        ("config.yaml", "a: [", "config.yaml: cannot be read"),
        ("config.yaml", "", "config.yaml: is not what a run writes"),
        ("data/train/store.json", "[1, 2]", "store.json: is not what a run writes"),
        ("data/train/store.json", '{"accounting": {"read": "x"}, "sources": 3}', "store.json: is not what a run writes"),
        ("run.json", "[]", None),
        ("metrics.jsonl", "[]\n3\n", None),
    ],
)
def test_a_damaged_run_is_named_by_its_file(
    name: str, content: str | None, match: str | None, full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2 and the name of the file, or an export with a shorter card."""
    run = shutil.copytree(full, tmp_path / "run", ignore=shutil.ignore_patterns("exports"))
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    assert main(["export", str(run)]) == (2 if match else 0)
    if match:
        assert match in capsys.readouterr().err
        assert not list((run / "exports").glob("*"))


def test_a_card_of_what_is_left(full: Path, model_dir: Path, tmp_path: Path) -> None:
    """Torn metrics and a missing run.json shorten the card; the base is its title; paths with spaces do not leak."""
    run = shutil.copytree(full, tmp_path / "run", ignore=shutil.ignore_patterns("exports"))
    assert f"# {model_dir.name}, trained by forge sft\n" in (forge.export(run, tmp_path / "one") / "README.md").read_text()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    (run / "run.json").unlink()
    text = (run / "config.yaml").read_text()
    text = re.sub(
        r"^model_path: .*$", "model_path: /my secret/the base  # recipe /my secret/a recipe.yaml", text, flags=re.MULTILINE
    )
    text = re.sub(
        r"^osft_cache: .*$", "osft_cache: /my secret/the cache  # recipe /my secret/a recipe.yaml", text, flags=re.MULTILINE
    )
    (run / "config.yaml").write_text(text)
    card = (forge.export(run, tmp_path / "two") / "README.md").read_text()
    assert "# the base, trained by forge\n" in card
    assert "| eval_loss |" in card
    assert "| osft_cache | the cache | recipe a recipe.yaml |" in card
    assert "secret" not in card
    assert "`forge `" not in card


def test_the_base_of_a_whole_model_stands_in_the_head(full: Path, tmp_path: Path) -> None:
    """A Hub name of the base is in the card's metadata."""
    run = shutil.copytree(full, tmp_path / "run", ignore=shutil.ignore_patterns("exports"))
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"^model_path: \S+", "model_path: org/smol", text, flags=re.MULTILINE))
    (run / "run.json").write_text('{"verb": "sft", "model": "hub:org/smol"}')
    card = (forge.export(run, tmp_path / "out") / "README.md").read_text()
    assert "\nbase_model: org/smol\n" in card
    assert "# org/smol, trained by forge sft\n" in card


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("see https://me:SECRET@host/a/b.jsonl?token=SECRET and /home/me/x.jsonl", "see https://host/a/b.jsonl and x.jsonl"),
        (r"C:\Users\me\my models\smol", "smol"),
        (r"from C:\Users\me\smol, then", "from smol, then"),
        ("~me/models/smol", "smol"),
        ("of ~me/models/smol", "of smol"),
        ("/my models/the base", "the base"),
        ("org/name", "org/name"),
    ],
)
def test_paths_and_addresses_in_a_card(text: str, public: str) -> None:
    """Their private parts are removed, whatever their form."""
    assert redact(text) == public


def test_a_path_of_two_words_is_no_hub_name() -> None:
    """Only the form org/name stays whole."""
    assert (last_part("my dir/the base"), last_part("a/b/c"), last_part("org/name")) == ("the base", "c", "org/name")
    assert last_part("https://me:SECRET@host/a b?token=SECRET,SECRET") == "https://host/a b"


@pytest.mark.slow
def test_a_package_that_is_missing_is_found_before_a_model_is_read(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gguf nothing is loaded, merged or written."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    for name in ("merge_adapter", "load_trained"):
        monkeypatch.setattr(forge_dist, name, lambda *_args, **_more: pytest.fail("a model was read"))
    with pytest.raises(forge_dist.ModelError, match=r"pip install 'forge-dist\[gguf\]'"):
        forge.export(full, tmp_path / "out", format="gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize(
    ("config", "dtype", "said"),
    [
        ({"hidden_act": "gelu"}, "float16", "hidden_act='gelu' of this llama model is nothing that readers of GGUF"),
        (
            {"architectures": ["CohereForCausalLM"], "model_type": "cohere"},
            "float16",
            r"CohereForCausalLM \(model_type cohere\) cannot",
        ),
        ({"hidden_size": 40, "head_dim": 10, "intermediate_size": 72}, "q8_0", "no matrix of this model can be q8_0"),
    ],
)
def test_what_gguf_cannot_hold_is_found_before_a_model_is_read(
    adapter: bool,
    config: dict[str, Any],
    dtype: str,
    said: str,
    full: Path,
    lora: Path,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The configuration says it, of a merged adapter that of its base: nothing is loaded, merged or written."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    model = shutil.copytree(model_dir if adapter else next(full.glob("hf_format/samples_*")), tmp_path / "model")
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"num_attention_heads": 4, "num_key_value_heads": 2} | config))
    given = model
    if adapter:
        given = shutil.copytree(next(lora.glob("hf_format/samples_*")), tmp_path / "adapter")
        about = json.loads((given / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(model)}
        (given / "adapter_config.json").write_text(json.dumps(about))
        (given / "forge_base.json").unlink(missing_ok=True)
    for name in ("merge_adapter", "load_trained"):
        monkeypatch.setattr(forge_dist, name, lambda *_args, **_more: pytest.fail("a model was read"))
    with pytest.raises(forge_dist.ModelError, match=f"out/.*gguf: .*{said}") as caught:
        forge.export(given, tmp_path / "out", format="gguf", dtype=dtype, merge=adapter)
    assert caught.value.exit_status == 2
    assert not (tmp_path / "out").exists()


def test_a_gguf_card_claims_no_template_that_is_not_there(full: Path, tmp_path: Path) -> None:
    """A tokenizer without one leaves the sentence about the tokenizer alone."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    model = shutil.copytree(next(full.glob("hf_format/samples_*")), tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    card = (forge.export(model, tmp_path / "out", format="gguf").parent / "README.md").read_text()
    assert "The tokenizer is in the file." in card


def test_where_an_output_makes_no_sense(full: Path, lora: Path) -> None:
    """Empty, or within what is exported."""
    with pytest.raises(forge.SettingsError, match="output is empty"):
        forge.export(full, "")
    before = sorted((full / "hf_format").rglob("*"))
    for place in ("hf_format/out", f"hf_format/{before[0].name}/out"):
        with pytest.raises(forge.SettingsError, match="lies within .*hf_format"):
            forge.export(full, full / place)
    assert sorted((full / "hf_format").rglob("*")) == before


def test_a_base_that_is_gone_is_named_as_one(lora: Path, tmp_path: Path) -> None:
    """The message says that it is the adapter's base, and which file names it."""
    adapter = shutil.copytree(next(lora.glob("hf_format/samples_*")), tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(forge.SettingsError, match="its base model is gone: adapter_config.json names .*gone"):
        forge.export(adapter, tmp_path / "out", merge=True)


def test_an_overflow_of_float16_is_named(full: Path, tmp_path: Path) -> None:
    """A weight beyond it is refused before anything is written, with the type that holds it."""
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(next(full.glob("hf_format/samples_*")), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(forge.SettingsError, match=r"up_proj.weight has a number of 100000, which overflows float16.*bfloat16"):
        forge.export(model, tmp_path / "out", dtype="float16")
    forge.export(model, tmp_path / "out", dtype="bfloat16")


@pytest.mark.parametrize("given", [{}, {"format": "gguf"}], ids=["hf", "gguf"])
def test_a_limit_of_file_sizes(given: dict[str, Any], full: Path, tmp_path: Path) -> None:
    """`ulimit -f` is named, and no other output, where it holds too; numpy says of GGUF only that nothing was written."""
    if given:
        pytest.importorskip("gguf")
    with (
        largest_file(60_000),
        pytest.raises(forge.dist.ExportError, match=r"File too large.* Nothing is there: .*`ulimit -f`.*: raise that limit\.$"),
    ):
        forge.export(full, tmp_path / "out", **given)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_at_the_card(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that cannot be written is named by its path; nothing is left."""
    from pathlib import Path as Paths

    write = Paths.write_text

    def full_disk(path: Path, *given: Any, **named: Any) -> int:
        if path.name == "README.md":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *given, **named)

    monkeypatch.setattr(Paths, "write_text", full_disk)
    with pytest.raises(forge.dist.ExportError, match=r"out/README.md cannot be written: No space left on device"):
        forge.export(full, tmp_path / "out")
    assert not list(tmp_path.iterdir())

"""Loading tokenizers, and refusing what is none."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge_data import TokenizerError, load_tokenizer
from forge_data.tokenizing._tokenizer import _loader, as_tokenizer


def test_a_directory_of_tokenizer_files(chatml_tokenizer, tmp_path, chat):
    """A directory with tokenizer files and no config.json is enough, template and tokens included."""
    chatml_tokenizer.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.is_fast
    messages = chat(("user", "hi"), ("assistant", "ho"))["messages"]
    assert loaded.apply_chat_template(messages) == chatml_tokenizer.apply_chat_template(messages)


def test_the_chat_template_of_a_processor(chatml_tokenizer, tmp_path):
    """A template that stands in the processor's file alone is read; the tokenizer's own comes first."""
    own = chatml_tokenizer.chat_template
    chatml_tokenizer.save_pretrained(tmp_path)
    processor = tmp_path / "chat_template.json"
    processor.write_text(json.dumps({"chat_template": "of the processor"}))
    assert load_tokenizer(tmp_path).chat_template == own
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(tmp_path).chat_template == "of the processor"
    for broken, message in (
        ("{", "holds no chat_template"),
        ("{}", "holds no"),
        ('{"chat_template": [1]}', "must be a string"),
    ):
        processor.write_text(broken)
        with pytest.raises(TokenizerError, match=rf"chat_template\.json.*{message}"):
            load_tokenizer(tmp_path)


@pytest.mark.slow
def test_tokenizer_files_need_no_torch(chatml_tokenizer, tmp_path):
    """A directory of tokenizer files alone is loaded without torch, to what transformers makes of it; with a config.json
    transformers chooses the class.
    """
    from transformers import AutoTokenizer

    chatml_tokenizer.save_pretrained(tmp_path)
    loaded, chosen = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is type(chosen)
    assert loaded.backend_tokenizer.to_str() == chosen.backend_tokenizer.to_str()
    assert loaded.init_kwargs == chosen.init_kwargs
    assert loaded.chat_template == chosen.chat_template
    code = f"import sys, forge_data; forge_data.load_tokenizer({str(tmp_path)!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False"], done.stderr
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert _loader(tmp_path) == AutoTokenizer.from_pretrained


@pytest.mark.parametrize("name", ["./nothing", "/no/such/directory", "a/b/c", "what is this?", ""])
def test_no_directory(name):
    """A path where nothing is, and that is no Hub name, is refused at once."""
    with pytest.raises(
        TokenizerError, match=r"no tokenizer at .*: nothing there; give a directory that holds tokenizer.json, or a name"
    ):
        load_tokenizer(name)


def test_a_file(tmp_path):
    """A file is refused: a directory is needed."""
    (tmp_path / "model.gguf").touch()
    with pytest.raises(TokenizerError, match="a file; give a directory"):
        load_tokenizer(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("x" * 300, "File name too long"), ("a\0b", "null (byte|character)"), ("~no-such-user-here/model", "home directory")],
)
def test_a_path_that_cannot_be_looked_at(name, reason):
    """An error of the system about a path is reported, though it might have been a Hub name."""
    with pytest.raises(TokenizerError, match=f"no tokenizer at .*: .*{reason}.*; check the path"):
        load_tokenizer(name)


def test_a_directory_that_may_not_be_entered(tmp_path, monkeypatch):
    """A path without permission is refused with the reason."""

    def refuse(self, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(TokenizerError, match="private/model': Permission denied; check the path and who may read it"):
        load_tokenizer(tmp_path / "private" / "model")


def test_a_directory_that_may_not_be_listed(tmp_path, monkeypatch):
    """A directory that can be entered but not listed is still refused as one without a tokenizer."""

    def refuse(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(TokenizerError, match="it holds what cannot be listed: Permission denied"):
        load_tokenizer(tmp_path)


def test_a_directory_of_other_things(tmp_path):
    """A directory without a tokenizer is refused with what it holds and what is missing."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(
        TokenizerError, match=r"no usable tokenizer in the directory .*holds config.json, notes.txt.* it needs tokenizer.json"
    ) as raised:
        load_tokenizer(str(tmp_path))
    assert "one of;" not in str(raised.value)


def test_a_broken_file(chatml_tokenizer, tmp_path):
    """A tokenizer.json that is torn is refused by its directory."""
    chatml_tokenizer.save_pretrained(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(TokenizerError, match="no usable tokenizer in the directory"):
        load_tokenizer(str(tmp_path))


def test_a_package_that_is_missing(chatml_tokenizer, tmp_path, monkeypatch):
    """A loader that lacks a package says so; the tokenizer is there, so nobody looks for it in vain."""

    def refuse(*_, **__):
        raise ImportError("LlamaTokenizer requires the SentencePiece library but it was not found.")

    chatml_tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("forge_data.tokenizing._tokenizer._loader", lambda _: refuse)
    with pytest.raises(TokenizerError, match="requires the SentencePiece library.*install it") as raised:
        load_tokenizer(tmp_path)
    assert "no usable tokenizer" not in str(raised.value)
    with pytest.raises(TokenizerError, match="the tokenizer of 'org/model' was not loaded: a package that it needs"):
        load_tokenizer("org/model")


def test_brackets_are_no_configuration(chatml_tokenizer, tmp_path):
    """Files that are nested deeper than Python follows are refused by the directory, not by a RecursionError."""
    chatml_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(TokenizerError, match="no usable tokenizer in the directory"):
        load_tokenizer(tmp_path)


def test_no_such_name_on_the_hub():
    """A name that the Hub does not give (here: no network) is refused with both remedies."""
    with pytest.raises(
        TokenizerError, match="no tokenizer called 'nobody/nothing': there is no such directory, and the Hugging Face Hub"
    ):
        load_tokenizer("nobody/nothing")


def test_a_slow_tokenizer():
    """A tokenizer that cannot report its tokens' characters is refused."""

    class Slow:
        is_fast = False

    with pytest.raises(TokenizerError, match="Slow has no fast backend"):
        as_tokenizer(Slow())

"""Where a model is looked for, and what is refused before torch is imported."""

from __future__ import annotations

import io
import json
import logging
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forge
from forge.cli._app import main, make_app
from forge.exporting._request import ExportRequest
from forge.reports._record import read_record
from forge.talking._model import Sampling, _template, find_model
from forge.talking._stops import end_of


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_a_model_that_is_not_there_is_refused_before_torch(command: str, tmp_path: Path) -> None:
    """At once, with what lies beside it; a prompt is not waited for."""
    (tmp_path / "r" / "first").mkdir(parents=True)
    code = (
        f"import sys\nfrom forge.cli._app import main\nstatus = main([{command!r}, 'r/nothing'])\n"
        "assert 'torch' not in sys.modules\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("forge: MODEL_PATH 'r/nothing': there is no such directory here (r/ holds first)")


@pytest.mark.parametrize("name", ["./nothing", "a/b/c", "/no/such"])
def test_a_path_is_no_hub_name(name: str) -> None:
    """The hub is not asked for what cannot be a name there."""
    with pytest.raises(forge.SettingsError, match="there is no such directory"):
        find_model(name)


def test_a_folder_of_runs_names_them(tmp_path: Path) -> None:
    """Of what is no run or model the message says what lies in it; of what is missing, what lies beside it."""
    for name, mark in (("first", "config.yaml"), ("merged", "config.json"), ("notes", "x.md")):
        (tmp_path / name).mkdir()
        (tmp_path / name / mark).touch()
    held = f"{tmp_path}/ holds first, merged. "
    with pytest.raises(forge.SettingsError, match=f"is neither a run nor a model.* {held}"):
        find_model(tmp_path)
    with pytest.raises(forge.SettingsError, match=f"there is no such directory. {held}"):
        find_model(tmp_path / "frist")
    with pytest.raises(forge.SettingsError, match=f"there is no such directory. {held}"):
        read_record(tmp_path / "frist")
    (tmp_path / "m q.gguf").touch()
    with pytest.raises(forge.SettingsError, match=r"is a GGUF file, which llama\.cpp reads: `llama-cli -m '.*/m q\.gguf'`\. "):
        find_model(tmp_path / "m q.gguf")


def test_a_model_with_a_head_of_numbers_is_named(tmp_path: Path) -> None:
    """A classifier is not said to be a reward model alone."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    with pytest.raises(forge.SettingsError, match="is a reward model or a classifier: it gives texts numbers"):
        find_model(tmp_path)


def test_a_verb_refuses_a_hub_name_that_cannot_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the rows are looked at, and nothing is written."""
    words = ["sft", "--model-path", "org/x", "--data-path", "none.jsonl", "--ckpt-output-dir", str(tmp_path / "run")]
    assert main(words) == 2
    assert "--model-path 'org/x': there is no such directory here" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_which_template_and_which_thinking_mode(tmp_path: Path) -> None:
    """Said of a run by its settings, of a model by its template."""
    (tmp_path / "config.yaml").write_text("model_path: a\nchat_template_kwargs: {enable_thinking: false}\n")
    switch = "{% if enable_thinking %}"
    assert _template(None, "m") == "no chat template: the prompt is continued as it stands"
    assert _template("plain", tmp_path) == "the chat template that it was trained with; it has no thinking mode"
    assert _template(switch, tmp_path).endswith("thinking mode: enable_thinking=false, as it was trained")
    assert _template(switch, "m") == (
        "its own chat template; thinking mode: the template's own choice (enable_thinking is not set)"
    )


def test_an_answer_ends_before_its_stop_string() -> None:
    """The first of several counts."""
    assert end_of("one two three", ["three", "two"]) == 4
    assert end_of("one", ["two"]) == 3
    with pytest.raises(forge.SettingsError, match="an empty text"):
        Sampling(stop=("",))


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # by plain PEFT 0.21, as of transformers 5.24
@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_virtual_tokens_stand_before_what_is_answered(kind: str, model_dir: Path, tmp_path: Path) -> None:
    """Token for token the likeliest by plain PEFT's forward over all that came before, without a cache."""
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    base.save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    made = {"prefix": peft.PrefixTuningConfig, "prompt": peft.PromptTuningConfig}[kind]
    model = peft.get_peft_model(base, made(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    tokenizer.save_pretrained(tmp_path / "adapter")
    asked = [{"role": "user", "content": "what colour has the fig?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    begun = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]

    def likeliest(from_model: torch.nn.Module) -> str:
        ids = begun
        with torch.no_grad():
            for _ in range(6):
                ids = torch.cat((ids, from_model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
        return tokenizer.decode(ids[0, begun.shape[1] :], skip_special_tokens=True).strip()

    with model.disable_adapter():
        without = likeliest(model)
    # Drawn until they change the answer to a text of at least two different words.
    expected = ""
    for _ in range(50):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=2.0)
        expected = likeliest(model)
        if expected != without and len(set(expected.split())) > 1:
            break
    assert expected != without
    model.save_pretrained(tmp_path / "adapter")
    assert forge.generate(tmp_path / "adapter", "what colour has the fig?", max_new_tokens=6, temperature=0) == expected


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("what colour has the fig?\n/reset\n\nwhat colour has the fig?\n/quit\nno\n"))


@pytest.mark.usefixtures("typed")
def test_a_conversation_from_a_pipe(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line is answered by both models as `forge.generate` answers it; after /reset nothing is remembered."""
    alone = forge.generate(model_dir, "what colour has the fig?", max_new_tokens=5)
    about_nothing = capsys.readouterr().err.rpartition("the model ")[2].strip().removesuffix(".")
    assert main(["chat", str(model_dir), "--beside", str(model_dir), "--max-new-tokens", "5"]) == 0
    said = capsys.readouterr()
    answers = [part.partition("\n")[2].strip() for part in said.out.split(f"[{model_dir}]")[1:]]
    assert answers == [alone or f"({about_nothing})"] * 4
    assert "its own chat template" in said.err
    assert "begins anew" in said.err


def test_the_history_is_part_of_what_is_asked(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """System message, both former turns, the new one; a stop string is not shown."""
    from forge.talking import _chat

    asked = []

    def answer(self: object, messages: object, sampling: object, shown: object, *, media: object) -> str:
        asked.append(messages)
        shown("fine")  # ty: ignore
        return "fine"

    monkeypatch.setattr(_chat.AnsweringModel, "answer", answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand?\n/system be brief\nso?\n"))
    forge.chat(model_dir, system="be kind")
    roles = [[(one["role"], one["content"]) for one in each] for each in asked]
    assert roles == [
        [("system", "be kind"), ("user", "hello")],
        [("system", "be kind"), ("user", "hello"), ("assistant", "fine"), ("user", "and?")],
        [("system", "be brief"), ("user", "so?")],
    ]


def test_what_is_shown_is_the_answer(model_dir: Path) -> None:
    """Streamed pieces joined are the answer, cut before a stop string that only later pieces complete."""
    import torch

    from forge.talking._model import AnsweringModel

    model = AnsweringModel(model_dir)
    asked = [{"role": "user", "content": "what colour has the fig?"}]

    def answer(stop: tuple[str, ...] = (), pieces: list[str] | None = None) -> str:
        torch.manual_seed(3)
        sampling = Sampling(max_new_tokens=12, temperature=1.0, stop=stop)
        return model.answer(asked, sampling, None if pieces is None else pieces.append)

    whole, all_of_it, until_stop = answer(), [], []
    assert len(whole) > 9
    assert answer((), all_of_it) == whole == "".join(all_of_it).strip()
    made = answer((whole[5:9],), until_stop)
    assert made == whole[: whole.index(whole[5:9])].strip() == "".join(until_stop).strip()


@pytest.mark.parametrize(
    ("made", "stop", "said"),
    [
        ("\n" * 8, (), "wrote blanks alone, and was cut off at 8 tokens"),
        ("\nEOS", (), "wrote blanks alone, and ended its answer"),
        ("EOS", (), "ended its answer at once, without a word"),
        ("PADPADEOS", (), "wrote special tokens alone, and ended its answer"),
        ("\nEnd", ("End",), "wrote a stop text before any word"),
    ],
)
def test_how_an_empty_answer_came_about(
    made: str, stop: tuple[str, ...], said: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One that was cut off in blanks has not ended; `generate` says it on stderr, and `chat` in the answer's place."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    special = {"EOS": tokenizer.eos_token_id, "PAD": tokenizer.pad_token_id}
    pieces = re.findall("EOS|PAD|\\n|End", made)
    ids = [each for piece in pieces for each in ([special[piece]] if piece in special else tokenizer(piece)["input_ids"])]

    def drawn(_: object, *, input_ids: Any, **__: object) -> Any:
        return torch.cat([input_ids, torch.tensor([ids])], dim=1)

    monkeypatch.setattr(transformers.GenerationMixin, "generate", drawn)
    if not stop:
        assert forge.generate(model_dir, "hello") == ""
        assert capsys.readouterr().err.endswith(f"the model {said}.\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    forge.chat(model_dir, stop=stop)
    assert capsys.readouterr().out == f"({said})\n"


def test_a_prompt_from_standard_input(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a prompt it is read there; an empty one is refused."""
    given = forge.generate(model_dir, "hello", max_new_tokens=4)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["generate", str(model_dir), "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.strip() == given
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert main(["generate", str(model_dir)]) == 2


def test_a_context_that_does_not_hold_the_answer(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both numbers stand there before the answer is drawn, once; transformers reminded of one of them behind it."""
    from forge.talking._model import AnsweringModel

    small = shutil.copytree(model_dir, tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 48}))
    model = AnsweringModel(small)
    logged: list[logging.LogRecord] = []
    handler = SimpleNamespace(level=0, handle=logged.append)
    monkeypatch.setattr(logging.getLogger("transformers.generation.stopping_criteria"), "handlers", [handler])
    said = []
    for words, length in ((1, 4), (1, 60), (2, 60), (99, 1), (99, 2)):
        model.answer([{"role": "user", "content": "apple " * words}], Sampling(max_new_tokens=length))
        said.append(capsys.readouterr().err)
    assert [bool(each) for each in said] == [False, True, False, True, False]
    assert re.search(r"has \d+ tokens, and an answer of up to 60 may follow; this model was made for 48 positions", said[1])
    assert re.search(r"has \d\d\d tokens; this model was made for 48 positions", said[3])
    assert not logged


def test_a_server_that_is_not_installed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of three servers, with the path of the export; an adapter is sent to `forge export --merge`."""
    monkeypatch.setattr("forge.talking._serve.find_spec", lambda _: None)
    with pytest.raises(forge.SettingsError) as caught:
        forge.serve(model_dir)
    assert [f"{command} {model_dir}" in str(caught.value) for command in ("transformers serve", "vllm serve", "forge export")]
    gguf = next(line for line in str(caught.value).splitlines() if "llama-server" in line)
    words = shlex.split(gguf.partition("&&")[0])[1:]
    command, bound, *_ = make_app("export", words).parse_args(words, exit_on_error=False, print_error=False)
    given = dict(zip(command.flags, bound.args, strict=False)) | bound.kwargs
    request = ExportRequest.of(**{"merge": False, "dtype": None, **given}).read()  # raises where `forge export` would
    assert (request.folder, request.output.name, request.format) == (model_dir, "model-gguf", "gguf")
    assert f"-m {request.output.name}/" in gguf
    adapter = model_dir.parent / "an adapter"
    adapter.mkdir(exist_ok=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"task_type": "CAUSAL_LM"}))
    with pytest.raises(forge.SettingsError, match="--merge"):
        forge.serve(adapter)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_that_is_taken(
    host: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused before a server is started, which would read the model first; a port that is free again is not."""
    started: list[object] = []
    monkeypatch.setattr("forge.talking._serve.find_spec", lambda _: True)
    monkeypatch.setattr("forge.talking._serve.subprocess.Popen", lambda *_, **__: started.append(1) or Stopped())
    with socket.create_server((host, 0)) as other:
        words = ["serve", str(model_dir), "--host", host, "--port", str(other.getsockname()[1])]
        assert main(words) == 2
    said = capsys.readouterr().err
    assert said == f"forge: --port: {words[-1]} of {host} is taken by another program. End it, or give another --port.\n"
    assert main(words) == 0
    assert len(started) == 1


@pytest.mark.parametrize(("host", "said"), [("192.0.2.1", "cannot be listened on"), ("no..such", "is no address")])
def test_a_host_that_is_another_machine(
    host: str, said: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An address that this machine has not, and a name that leads to none."""
    monkeypatch.setattr("forge.talking._serve.find_spec", lambda _: True)
    assert main(["serve", str(model_dir), "--host", host]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_reaches_the_server(
    number: signal.Signals, status: int, model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At once: it was killed after three seconds, in which it went on. The exit status is that of the signal."""
    program, told = tmp_path / "server", tmp_path / "told"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(told)!r}).touch(), sys.exit()))\n"
        "time.sleep(0.2)\n"
        f"os.kill(os.getppid(), {number.value})\n"
        "signal.pause()\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr("forge.talking._serve.find_spec", lambda _: True)
    monkeypatch.setattr("forge.talking._serve.sys", SimpleNamespace(executable=str(program), stderr=sys.stderr))
    assert main(["serve", str(model_dir), "--port", str(free_port())]) == status
    assert told.exists()
    program.write_text("#!/bin/sh\nkill -TERM $$\n")
    assert main(["serve", str(model_dir), "--port", str(free_port())]) == 143


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Stopped:
    """Server that has ended."""

    def wait(self, *_: object) -> int:
        """Return its exit status."""
        return 0

    poll = wait

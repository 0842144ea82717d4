"""The benchmarks run at toy size and print what their README says; their formulas are right. No timing is tested."""

import importlib
import importlib.util
import itertools
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from forge_data import load_tokenizer

from ..lanes import ci_keeps
from .conftest import write_model

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COMMON = {"benchmark", "claim", "ratio", "target", "met", "toy", "machine", "versions", "sizes"}
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason="trl is not installed: hatch run peers:python -m pytest -m lane tests/whole/test_benchmarks.py",
)


def run_toy(script, *arguments):
    """Run a benchmark as a user does; return its one line as a dictionary."""
    command = [sys.executable, str(BENCHMARKS / script), "--toy", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    figures = json.loads(line)
    assert set(figures) >= COMMON
    assert figures["benchmark"] == script.removesuffix(".py")
    assert figures["ratio"] > 0
    assert figures["toy"] is True
    assert figures["met"] is None
    assert figures["machine"]["cores"] >= 1
    assert figures["versions"]["forge-llm"]
    return figures


@pytest.fixture
def benchmark_modules(monkeypatch):
    """Import a private module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCHMARKS:
            del sys.modules[name]


@pytest.mark.lane
def test_imports():
    """imports.py times the import of forge, of a leaf, and the help page."""
    figures = run_toy("imports.py")
    assert min(figures["help_seconds"], figures["bare_seconds"]) > 0
    assert figures["budgets"] == {"import_forge_over_bare_seconds": 0.1, "help_seconds": 0.5}


@pytest.mark.lane
def test_loop_overhead():
    """loop_overhead.py drives two loops that train the same: their losses after five steps are equal."""
    figures = run_toy("loop_overhead.py")
    assert figures["final_loss"]["forge"] == pytest.approx(figures["final_loss"]["bare"], rel=1e-5)
    assert {side["tokens_per_second"] > 0 for side in figures["sides"].values()} == {True}


@pytest.mark.lane
def test_bfloat16_cpu():
    """bfloat16_cpu.py trains the same on both sides, and times the products of each dtype."""
    figures = run_toy("bfloat16_cpu.py")
    assert figures["final_loss"]["bfloat16"] == pytest.approx(figures["final_loss"]["float32"], rel=1e-3)
    assert {side["products_seconds"] > 0 for side in figures["sides"].values()} == {True}


@pytest.mark.parametrize(
    ("option", "value"),
    ci_keeps(
        [],
        [("--only", "kernel,waits,packed_alone,probe_kernel"), ("--group", "right"), ("--group", "speed")],
    ),
)
def test_gpu_checks(option, value):
    """gpu/run.py's checks hold at toy size on a CPU, each on a line with its chip and versions; nothing is claimed of speed."""
    command = [sys.executable, str(BENCHMARKS / "gpu" / "run.py"), "--device", "cpu", "--toy", "--in-process"]
    done = subprocess.run([*command, option, value], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    assert done.returncode == 0, lines or done.stderr
    assert lines.pop()["failed"] == []
    assert len(lines) >= {"right": 25, "speed": 39}.get(value, 4)
    assert all(line["toy"] and line["chip"] and line["versions"]["torch"] for line in lines)


@pytest.mark.lane
@pytest.mark.parametrize(("shape", "adapter"), [("llama-3.2-1b", "none"), ("qwen3-0.6b", "lora")])
def test_gpu_sft(shape, adapter):
    """gpu_sft.py runs every side on the same rows, on a CPU too, where it claims no MFU unless the peak is known."""
    figures = run_toy("gpu_sft.py", "--shape", shape, "--adapter", adapter, "--sides", "forge", "bare", "--device", "cpu")
    assert set(figures["sides"]) == {"forge", "bare"}
    assert figures["first_loss"]["forge"] == pytest.approx(figures["first_loss"]["bare"], rel=1e-5)
    assert figures["device"]["chip"] == "none: not run on a GPU"
    assert figures["mfu"] is None
    assert all(side["tflops"] > 0 and side["peak_rss_bytes"] > 0 for side in figures["sides"].values())
    assert (figures["sizes"]["adapter_weights"] > 0) == (adapter == "lora")


@pytest.mark.lane
@needs_trl
@pytest.mark.parametrize(("adapter", "packing"), [("none", "rows"), ("lora", "bfd")])
def test_sft_vs_trl(adapter, packing):
    """sft_vs_trl.py trains both sides on the same rows to the same first loss, and reports both sides' memory."""
    figures = run_toy("sft_vs_trl.py", "--adapter", adapter, "--trl", packing)
    if packing == "rows":
        assert figures["first_loss"]["forge"] == pytest.approx(figures["first_loss"]["trl"], rel=1e-5)
    assert all(side["peak_rss_bytes"] >= side["rss_before_steps_bytes"] > 0 for side in figures["sides"].values())
    assert figures["memory_ratio"] > 0
    assert figures["cpu_time_ratio"] > 0


@pytest.mark.lane
@needs_trl
def test_dpo_vs_trl():
    """dpo_vs_trl.py trains both sides on the same pairs, to the same losses."""
    figures = run_toy("dpo_vs_trl.py")
    assert figures["first_loss"]["forge"] == pytest.approx(0.6931, abs=1e-3)
    assert figures["first_loss"]["forge"] == pytest.approx(figures["first_loss"]["trl"], rel=1e-4)


@pytest.mark.lane
@needs_trl
def test_images_vs_trl():
    """images_vs_trl.py trains both sides on the same rows with images, to the same first loss."""
    figures = run_toy("images_vs_trl.py")
    assert figures["first_loss"]["forge"] == pytest.approx(figures["first_loss"]["trl"], rel=1e-5)


@pytest.mark.lane
@needs_trl
def test_grpo_vs_trl():
    """grpo_vs_trl.py trains both sides on the same completions and rewards, to the same first loss."""
    figures = run_toy("grpo_vs_trl.py")
    assert abs(figures["first_loss"]["forge"]) > 1e-3
    assert figures["first_loss"]["forge"] == pytest.approx(figures["first_loss"]["trl"], rel=1e-4)


@pytest.mark.lane
@needs_trl
def test_alone_vs_trl():
    """alone_vs_trl.py trains both sides on the same chats, alone and padded, to the same first loss."""
    figures = run_toy("alone_vs_trl.py")
    assert figures["first_loss"]["forge"] == pytest.approx(figures["first_loss"]["trl"], rel=1e-4)
    assert figures["sizes"]["places_a_token_with_padding"] > 1


@pytest.mark.lane
@needs_trl
def test_sft_few_labels_vs_trl():
    """sft_few_labels_vs_trl.py trains both sides on rows of which a quarter is learned, to the same first loss."""
    figures = run_toy("sft_few_labels_vs_trl.py")
    assert figures["first_loss"]["forge"] == pytest.approx(figures["first_loss"]["trl"], rel=1e-5)
    assert figures["sizes"]["labelled_share"] == pytest.approx(0.25, abs=0.03)


@pytest.mark.lane
def test_head_alone():
    """head_alone.py compares the loss and the log-probabilities after it saw that they are equal."""
    figures = run_toy("head_alone.py")
    assert set(figures["cases"]) == {"loss_0.25", "logps_0.25"}
    for case in figures["cases"].values():
        assert case["peak_bytes"]["full"] > case["peak_bytes"]["chunked"] > 0


@pytest.mark.lane
def test_weights_drift():
    """weights_drift.py trains each side from the same weights on the same rows, and tells how far its losses drift."""
    pytest.importorskip("bitsandbytes")
    figures = run_toy("weights_drift.py")
    for found in figures["rates"].values():
        assert set(found["drift"]) == {"autocast", "bfloat16", "nearest"}
        assert all(0 < drift < 0.01 for drift in found["drift"].values())


@pytest.mark.lane
def test_qat():
    """qat.py measures the same rounding of a model that learned with it, and of one that did not."""
    pytest.importorskip("gguf")
    figures = run_toy("qat.py")
    assert set(figures["kinds"]) == {"q4_0", "q8_0"}
    for found in figures["kinds"].values():
        assert found["rounded afterwards"]["loss"] != found["qat"]["loss"] != found["qat unrounded"]["loss"]


@pytest.mark.lane
def test_online_arithmetic(tmp_path):
    """online_arithmetic.py trains a model twice and reports each rollout's rewards."""
    figures = run_toy("online_arithmetic.py", "--model", str(write_model(tmp_path / "model")))
    assert len(figures["rewards"]) == 2
    assert 0 <= figures["before"] <= 1


@pytest.mark.lane
def test_osft_step():
    """osft_step.py trains both sides from the same model, of which OSFT trains a part."""
    figures = run_toy("osft_step.py")
    assert 0 < figures["trainable"]["osft"] < figures["trainable"]["full"]
    assert figures["over_full"] > 0


@pytest.mark.lane
def test_osft_cost():
    """osft_cost.py steps every installed side from the same layer, and reports what each keeps."""
    figures = run_toy("osft_cost.py")
    sides = {"dense", "lora", "peft_osf", "direct", "factors", "paper"}
    if importlib.util.find_spec("mini_trainer") is None:
        assert figures["missing_sides"] == ["mini_trainer"]
    else:
        sides.add("mini_trainer")
    for shape, found in figures["cases"].items():
        N, M = map(int, shape.split("x"))
        assert set(found) == sides
        assert found["dense"]["trainable"] == N * M
        # C [r, r], A [N, r] or B [r, M], and two moments of each.
        r = min(N, M) // 4
        assert found["direct"]["trainable"] == (r * r if N == M else max(N, M) * r)
        assert found["direct"]["projections"] == 0 < found["paper"]["projections"]
        assert found["direct"]["optimizer_bytes"] == pytest.approx(8 * found["direct"]["trainable"], abs=64)


@pytest.mark.lane
@needs_trl
def test_gpu_sft_beside_trl():
    """gpu_sft.py has TRL as a third side where it is installed."""
    figures = run_toy("gpu_sft.py", "--device", "cpu")
    assert set(figures["sides"]) == {"forge", "bare", "trl"}
    assert figures["missing_sides"] == []


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="trl is installed here")
def test_without_trl_the_comparison_does_not_start():
    """sft_vs_trl.py names what is missing and how to run it, and prints no figure."""
    command = [sys.executable, str(BENCHMARKS / "sft_vs_trl.py"), "--toy"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "trl is not installed" in done.stderr


@pytest.mark.parametrize(
    "script",
    ci_keeps(
        ["data_store.py", "packing_order.py"],
        [
            "data_small.py",
            "data_tokenize.py",
            "data_word_cache.py",
            "data_workers.py",
            "data_memory.py",
            "data_store.py",
            "packing_order.py",
            "packing_plan.py",
            "online_rows.py",
        ],
    ),
)
def test_a_side_of_our_own(script):
    """The benchmarks that need no other library measure what they claim."""
    assert run_toy(script)["claim"]


@pytest.mark.lane
@pytest.mark.parametrize(
    ("script", "module"),
    [
        ("data_vs_trl.py", "trl"),
        ("data_vs_instructlab.py", "instructlab"),
        ("packing_quality.py", "trl"),
        ("packing_speed.py", "mini_trainer"),
        ("packing_collate.py", "mini_trainer"),
    ],
)
def test_beside_another_library(script, module):
    """The claims against another library run where it is installed, and compare the same work."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: hatch run peers:python -m pytest -m lane tests/whole/test_benchmarks.py")
    assert run_toy(script)["claim"]


@pytest.mark.lane
def test_shared_prompts():
    """shared_prompts.py trains the same with prompts once and twice, and more tokens go through the model with the latter."""
    figures = run_toy("shared_prompts.py")
    assert figures["first_loss"]["prompts_once"] == pytest.approx(figures["first_loss"]["prompts_twice"], rel=1e-5)
    assert figures["tokens_ratio"] > 1.2


@pytest.mark.lane
def test_shared_histories():
    """shared_histories.py trains the same with histories once and repeated, and more tokens go through the model repeated."""
    figures = run_toy("shared_histories.py")
    assert figures["first_loss"]["turns_shared"] == pytest.approx(figures["first_loss"]["turns_repeated"], rel=1e-5)
    assert figures["tokens"]["turns_repeated"] > 1.2 * figures["tokens"]["turns_shared"]


@pytest.mark.lane
def test_shared_prefixes():
    """shared_prefixes.py trains the same on all sides, and least is computed where the plan knows the prefix."""
    sides = run_toy("shared_prefixes.py")["sides"]
    assert sides["planned"]["computed_tokens"] < 0.9 * sides["shared"]["computed_tokens"]
    assert sides["shared"]["computed_tokens"] < 0.9 * sides["repeated"]["computed_tokens"]
    assert sides["planned"]["micro_batches"] < sides["shared"]["micro_batches"]


@pytest.mark.lane
def test_online_learning():
    """online_learning.py trains with every method, and reports what each run learned."""
    figures = run_toy("online_learning.py")
    trained = [(run["method"], run["adapter"]) for run in figures["runs"]]
    assert set(trained) == set(itertools.product(["ppo", "grpo", "rloo"], ["none", "lora", "osft"]))
    assert len(trained) == 9
    assert all({"seed", "before", "after", "seconds"} <= set(run) for run in figures["runs"])


@pytest.mark.lane
def test_osft_continual():
    """osft_continual.py takes every method that is installed through its tasks, and compares our default with the rest."""
    figures = run_toy("osft_continual.py")
    assert set(figures["means"]["tuned"]) >= {"full", "lora", "peft-osf", "strict/direct", "strict/factors", "paper"}
    assert set(figures["means"]["level"]) == set(figures["rates"]["level"]) == set(figures["means"]["tuned"])
    assert figures["default"] in figures["means"]["level"]


@pytest.mark.lane
def test_continual_study_of_a_chat_model(tmp_path):
    """continual_study.py --model takes its methods through a chat model's tasks, keeps every cell, and runs none twice."""
    arguments = ("--model", str(write_model(tmp_path / "model")), "--work", str(tmp_path / "work"))
    figures = run_toy("continual_study.py", *arguments)
    kept = (tmp_path / "work" / "cells.jsonl").read_text(encoding="utf-8")
    cells = [json.loads(line) for line in kept.splitlines()]
    methods = ("full", "strict/direct", "inputs", "direct .50", "inputs .50")
    assert {(c["method"], c["seed"]) for c in cells} == {(m, s) for m in methods for s in (0, 1)}
    assert len(cells) == figures["cells"] == 10
    for cell in cells:
        assert len(cell["accuracy"]) == 3
        assert cell["kl_base"] > 0
        assert cell["text_loss"] != figures["before"]["text_loss"]
    assert run_toy("continual_study.py", *arguments)["cells"] == 10
    assert (tmp_path / "work" / "cells.jsonl").read_text(encoding="utf-8") == kept


def test_questions_of_a_chat_model(benchmark_modules, tmp_path):
    """Every answer stands in its line, is what is learned, and no line that is held out is trained on under any question."""
    chat, tokenizer = benchmark_modules("_continual_chat"), load_tokenizer(str(write_model(tmp_path)))
    kinds = chat.lines(chat.sources("s*.py"))
    assert min(len(found) for found in kinds.values()) > 20
    questions = chat.Questions(tokenizer, files=chat.sources("s*.py"), longest=400)
    seen = {False: set(), True: set()}
    for tag, (instruction, kind, answer) in chat.RULES.items():
        for held, lines in seen.items():
            ids, labels = questions.rule(tag, sum(questions.counted()[tag]), np.random.default_rng(0), held=held)
            for row, learned in zip(ids.tolist(), labels, strict=True):
                text, said = tokenizer.decode(row), tokenizer.decode(learned[learned != -100])
                line = text.split("user\n")[1].split("<|im_end|>")[0]
                assert f"system\n{instruction}<|im_end|>" in text
                assert said.removesuffix("\n") == f"{answer(kinds[kind][line])}<|im_end|>"
                assert answer(kinds[kind][line]) in line
                lines.add(line)
    assert not seen[True] & seen[False]


def test_a_chat_model_reads_packed_rows_one_by_one(benchmark_modules, tmp_path):
    """Logits and targets of rows in packed lines are those of each row alone; a row counts as right where all of it is."""
    chat, directory = benchmark_modules("_continual_chat"), write_model(tmp_path)
    questions = chat.Questions(load_tokenizer(str(directory)), files=chat.sources("s*.py"), longest=400)

    class Whole(chat.Chat):
        autocast = staticmethod(nullcontext)

    subject = Whole(directory, questions)
    model, batch = subject.new(), questions.rule("LSW", chat.TURNS + 3, np.random.default_rng(0))
    with torch.no_grad():
        logits, targets, rows = subject.scored(model, batch)
        for at, (ids, labels) in enumerate(zip(*batch, strict=True)):
            learned = (labels[1:] != -100).nonzero()[:, 0]
            alone = model(ids[None, : int(learned[-1]) + 2]).logits[0, learned]
            torch.testing.assert_close(logits[rows == at], alone, rtol=1e-4, atol=1e-5)
            assert targets[rows == at].tolist() == labels[1:][learned].tolist()
    said = torch.nn.functional.one_hot(targets, logits.shape[-1]).float()
    said[(rows == 2).nonzero()[0, 0]] = 0
    said[rows == 5] = 0

    class Fixed(Whole):
        def scored(self, model, batch):
            return said, targets, rows

    assert Fixed(directory, questions).accuracy(model, batch) == pytest.approx(1 - 2 / len(batch[0]))


@pytest.mark.parametrize(
    "script",
    ci_keeps([], ["dist_save.py", "dist_memory.py", "dist_restart.py", "dist_scale.py", "dist_load.py"]),
)
def test_over_ranks(script):
    """The benchmarks of ranks and full states measure what they claim."""
    assert run_toy(script)["claim"]


@pytest.mark.lane
def test_dist_step():
    """dist_step.py drives two sides that train the same, step by step."""
    figures = run_toy("dist_step.py")
    assert figures["losses"]["ours"] == pytest.approx(figures["losses"]["bare"], rel=1e-3)


def test_a_side_that_dies_ends_the_benchmark(benchmark_modules, tmp_path):
    """A worker that cannot start is an error that names its side, and leaves no other side running."""
    lockstep = benchmark_modules("_lockstep")
    with pytest.raises(lockstep.WorkerError, match="'nobody' ended with exit status 1"):
        lockstep.race({"rows": str(tmp_path / "none.npz"), "device": "cpu"}, tmp_path, ["nobody"], 1)


def test_sides_that_disagree_end_the_benchmark(benchmark_modules):
    """First losses that differ are no comparison."""
    agree = benchmark_modules("_lockstep").agree
    assert agree({"a": [{"loss": 2.0}], "b": [{"loss": 2.0001}]}, tolerance=1e-4) == {"a": 2.0, "b": 2.0001}
    with pytest.raises(SystemExit, match="do not train the same"):
        agree({"a": [{"loss": 2.0}], "b": [{"loss": 2.01}]}, tolerance=1e-4)


def test_chats_are_labelled_on_the_assistant_alone(benchmark_modules):
    """Every chat has learned tokens, they are the answer's, and the answer does not stand in the question."""
    chats = benchmark_modules("_chats")
    encode = chats.stand_in_encode(1000)
    seen = list(chats.conversations("both", ("textwrap", "heapq")))
    assert len(seen) > 10
    for question, answer in seen:
        input_ids, labels = chats.tokenize_with_stand_in([question, answer], encode)
        learned = encode(answer["content"] + "<|im_end|>")
        assert labels == [-100] * (len(labels) - len(learned)) + learned
        assert input_ids[-len(learned) :] == learned
        assert answer["content"] not in question["content"]


def test_rows_hold_each_chat_once_and_are_full(benchmark_modules, tmp_path):
    """What the sides read is what was packed: no chat twice, none cut, each row between 95 % of its tokens and all of them."""
    chats_module, rows_module = benchmark_modules("_chats"), benchmark_modules("_rows")
    encode = chats_module.stand_in_encode(50_000)
    chats = chats_module.make_chats(
        lambda turns: chats_module.tokenize_with_stand_in(turns, encode),
        kind="both",
        max_length=256,
        modules=chats_module.TOY_MODULES,
    )
    rows = rows_module.write_rows(tmp_path / "rows.npz", chats, 256, 5)
    starts = chats.lengths.cumsum() - chats.lengths
    left = {
        (tuple(chats.input_ids[s : s + n]), tuple(chats.labels[s : s + n])) for s, n in zip(starts, chats.lengths, strict=True)
    }
    assert len(left) == len(chats.lengths)
    assert len(rows.samples) == 5
    for i, row in enumerate(rows.samples):
        assert 0.95 * 256 <= rows.tokens(i) <= 256
        assert rows.labelled(i) == sum(sum(label != -100 for label in s.labels[1:]) for s in row)
        for sample in row:
            left.remove((tuple(sample.input_ids), tuple(sample.labels)))
    with pytest.raises(SystemExit, match="lower --steps or --tokens"):
        rows_module.write_rows(tmp_path / "rows.npz", chats, 256, 500)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_flops_agree_with_torchs_counter(benchmark_modules, adapter, tmp_path):
    """The formula is what torch counts in a forward and a backward, once half of the attention is masked away.

    Torch counts attention densely, so the causal half is added to the formula. For LoRA it also leaves out the gradients before
    the first adapter, which the formula counts: hence eight layers, and 5 %.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    models, step_flops = benchmark_modules("_models"), benchmark_modules("_flops").step_flops
    shape = {**models.SHAPES["toy-llama"], "num_hidden_layers": 8}
    models.SHAPES["deep-toy"] = shape
    directory = models.write_model("deep-toy", tmp_path / "model")
    described = models.describe(directory, "deep-toy")
    causal_lm = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    model, adapter_weights = causal_lm, 0
    if adapter == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(causal_lm, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        adapter_weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    tokens, labelled = 96, 40
    with FlopCounterMode(display=False) as counter:
        hidden = causal_lm.model(input_ids=torch.arange(tokens)[None], use_cache=False).last_hidden_state[0]
        causal_lm.lm_head(hidden[:labelled]).sum().backward()
    masked_half = 6 * described.layers * described.heads * described.head_dim * tokens**2
    expected = step_flops(described, [tokens], labelled, lora_weights=adapter_weights) + masked_half
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.005 if adapter == "none" else 0.05)


def test_flops_of_a_packed_row_are_those_of_its_documents(benchmark_modules):
    """Attention between documents is not work: two documents in a row cost what they cost alone."""
    models, step_flops = benchmark_modules("_models"), benchmark_modules("_flops").step_flops
    model = models.Described("m", vocabulary=10, width=4, layers=2, heads=2, head_dim=2, linear_weights=100, tied=True)
    for lora_weights in (0, 30):
        together = step_flops(model, [30, 50], 20, lora_weights=lora_weights)
        apart = [step_flops(model, [n], p, lora_weights=lora_weights) for n, p in ((30, 8), (50, 12))]
        assert together == sum(apart)


def test_the_entry_for_a_gpu_is_there():
    """The results have figures from a GPU as raw lines, or state that there are none."""
    entry = (BENCHMARKS / "results" / "gpu_sft.md").read_text(encoding="utf-8")
    assert "not run on a GPU" in entry or '"benchmark": "gpu_sft"' in entry


def test_every_script_is_in_the_readme():
    """benchmarks/README.md names each claim's script and no other."""
    scripts = {str(path.relative_to(BENCHMARKS)) for path in (*BENCHMARKS.glob("[!_]*.py"), *BENCHMARKS.glob("*/[!_]*.py"))}
    page = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    named = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    assert named == scripts

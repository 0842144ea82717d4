"""Shell scripts, YAML and args.json of ms-swift → recipes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

import forge
from forge.cli._config import convert as convert_file, validate
from forge.settings._settings import flat_fields, resolve
from forge.settings.convert._commands import SWIFT, command_values
from forge.settings.convert._swift_arguments import DEFAULTS
from forge.verbs._registry import task_of

from ...whole.repository import ROOT
from .test_convert import converted

PAGE = (ROOT / "docs" / "migrating" / "ms-swift.md").read_text()
(SCRIPT,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
(RECIPE,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
TABLE = json.loads((Path(__file__).parent / "library_defaults.json").read_text())["ms_swift 4.6.0"]
HUB = "AI-MO/NuminaMath-TIR"
NINE = {"random_rows": 9}


def of(command: str = "sft", flags: str = "", before: str = "", verb: str | None = None) -> Any:
    """What `swift COMMAND` with a model, a file and these flags becomes."""
    return converted(f"{before}swift {command} --model org/m --dataset a.jsonl {flags} \\\n  --output_dir o\n", verb=verb)


def lost(found: Any) -> set[str]:
    return {line.partition(":")[0] for line in found.lost}


def runs(found: Any) -> None:
    """The recipe can be run, once what it leaves open is given."""
    need = {"reward": "r:f"} if found.verb == "grpo" else {"reward_model_path": "r"} if found.verb == "ppo" else {}
    resolve(task_of(found.verb).settings, ("recipe", {**need, **found.settings}))


def test_the_pages_example() -> None:
    """The script of the page becomes the recipe below it, and nothing of it is lost."""
    found, wanted = converted(SCRIPT), yaml.safe_load(RECIPE)
    assert (found.library, found.verb, found.lost) == ("ms-swift", "sft", [])
    wanted |= {"learning_rate": 1e-4}
    assert found.settings == wanted
    said = {line.partition(":")[0] for line in RECIPE.splitlines() if "ms-swift's" in line}
    assert said == set(found.comments)
    runs(found)


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("swift sft --model m --lora_rank 8\n", {"model": "m", "lora_rank": "8"}),
        ("swift sft --model=m --packing\n", {"model": "m", "packing": True}),
        ("swift sft --dataset 'a#5' \\\n   b#6 # some rows\n", {"dataset": ["a#5", "b#6"]}),
        ("n=4\nm='x y'\nswift sft --model \"$m\" --a $(expr 16 / $n) --b $((2 * n + 1)) --c ${n}x --d ${k:-7}\n",
         {"model": "x y", "a": "4", "b": "9", "c": "4x", "d": "7"}),
        ("swift sft --columns '{\"a\":\n \"b\"}' --system 'it'\\''s $5'\n", {"columns": '{"a":\n "b"}', "system": "it's $5"}),
        ("CUDA_VISIBLE_DEVICES=0 nohup swift sft --model m > log.txt 2>&1 &\n", {"model": "m"}),
        ("pip install x; swift sft --model m && echo done\n", {"model": "m"}),
        ("python -m swift.cli.sft --model m\n", {"model": "m"}),
        ("accelerate launch --config_file c.yaml swift/cli/sft.py --model m\n", {"model": "m"}),
        ("swift sft --model a --model b --lora-rank 2\n", {"model": "b", "lora_rank": "2"}),
        ("# swift rollout --model x\nswift sft --model m\n", {"model": "m"}),
        ("swift sft --model m \\\n  # --seed 3 \\\n  --lora_rank 4\n", {"model": "m", "stray_flags": ["--lora_rank 4"]}),
        ("swift export --model m --to_cached_dataset true --dataset d --max_length 9\nswift sft --model m --cached_dataset c\n",
         {"dataset": "d", "max_length": "9", "model": "m", "cached_dataset": "c"}),
        ("swift sft --learning_rate -1e-4\n", {"learning_rate": "-1e-4"}),
        ("swift sft $MORE --model <your-model> \\\n --seed 1\n", {"$MORE": True, "model": "<your-model>", "seed": "1"}),
        ("printf 'swift sft --model x'\nbash -c \"swift sft --model 'm'\"\n", {"model": "m"}),
        (": \"${M:=m}\"\nswift sft --model $M --lora_rank ${R:-8} \"$@\" 2>&1 | tee log\n", {"model": "m", "lora_rank": "8"}),
        ("ARGS=(\n  --model m\n  # --seed 3\n  --dataset 'a b' c\n)\nswift sft \"${ARGS[@]}\" --lora_rank 2\n",
         {"model": "m", "dataset": ["a b", "c"], "lora_rank": "2"}),
        ("cat > ds.json <<'END'\nit's swift sft --model x\nEND\necho swift sft\nif true; then swift sft --model m; fi\n",
         {"model": "m"}),
    ],
)  # fmt: skip
def test_a_script_is_read_as_a_shell_reads_it(script: str, flags: dict[str, Any]) -> None:
    """Quotes, lines that go on, comments, variables and arithmetic; the last of a flag holds."""
    found = command_values(script, "t.sh")
    assert found is not None
    assert {name: value for name, value in found.items() if name not in ("ENV", SWIFT)} == flags


@pytest.mark.parametrize(
    ("script", "ranks", "settings"),
    [
        ("swift sft", 1, {}),
        ("NPROC_PER_NODE=4 swift sft", 4, {"nproc_per_node": 4}),
        ("export NPROC_PER_NODE=4\nswift sft", 4, {"nproc_per_node": 4}),
        ("NPROC_PER_NODE=4\nswift sft", 1, {}),  # which swift does not see
        (
            "NNODES=2 NODE_RANK=1 MASTER_ADDR=host MASTER_PORT=29 NPROC_PER_NODE=4 swift sft",
            8,
            {"nproc_per_node": 4, "nnodes": 2, "node_rank": 1, "master_addr": "host", "master_port": 29},
        ),
        ("torchrun --nproc_per_node=2 --nnodes 1 swift/cli/sft.py", 2, {"nproc_per_node": 2}),
    ],
)
def test_the_batch_is_that_of_all_gpus(script: str, ranks: int, settings: dict[str, Any]) -> None:
    """Rows of a GPU, times the batches whose gradients are added, times the GPUs; 16 rows where a file says nothing."""
    found = converted(f"{script} --model m --dataset a --per_device_train_batch_size 2 --gradient_accumulation_steps 4 \\\n\n")
    assert found.settings["effective_batch_size"] == 8 * ranks
    launch = ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port")
    assert {name: found.settings[name] for name in launch if name in found.settings} == settings
    open_steps = converted(f"{script} --model m --dataset a --per_device_train_batch_size 3 \\\n\n")
    assert open_steps.settings["effective_batch_size"] == max(1, -(-16 // (3 * ranks))) * 3 * ranks
    assert "effective_batch_size" not in lost(found) | lost(open_steps)


def test_how_many_gpus_may_be_open() -> None:
    """YAML does not say it, nor a variable that the script does not set."""
    found = converted("model: m\ntuner_type: full\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n")
    assert found.settings["effective_batch_size"] == 8
    assert "effective_batch_size" in lost(found)
    found = of(before="NPROC_PER_NODE=$N ", flags="--gradient_accumulation_steps 4 --seed $SEED")
    assert {"NPROC_PER_NODE", "effective_batch_size", "seed"} <= lost(found)
    found = converted("ENV: {NPROC_PER_NODE: 8}\nmodel: m\ntuner_type: full\ngradient_accumulation_steps: 2\n")
    assert (found.settings["effective_batch_size"], found.settings["nproc_per_node"]) == (16, 8)


@pytest.mark.parametrize(
    ("dataset", "settings"),
    [
        ("a.jsonl b.jsonl", {"data_path": ["a.jsonl", "b.jsonl"]}),
        ("a.jsonl#9 ./rows/b.jsonl#9", {"data_path": {"a.jsonl": NINE, "./rows/b.jsonl": NINE}}),
        ("a.jsonl#9 b.jsonl", {"data_path": {"a.jsonl": NINE, "b.jsonl": {}}}),
        (HUB, {"data_path": f"{HUB}:train"}),
        (f"{HUB}#9", {"data_path": {f"{HUB}:train": NINE}}),
        ("HF::org/name#9", {"data_path": {"org/name:train": NINE}}),
        ("AI-ModelScope/alpaca-gpt4-data-zh", {"data_path": "llm-wizard/alpaca-gpt4-data-zh:train"}),
    ],
)
def test_data_sets(dataset: str, settings: dict[str, Any]) -> None:
    """Files, names of a hub, and so many rows of each at random."""
    found = of(flags=f"--dataset {dataset}")
    assert {name: found.settings.get(name) for name in ("data_path", *settings)} == settings
    assert not found.lost
    runs(found)


@pytest.mark.parametrize(
    ("dataset", "part"),
    [
        ("swift/self-cognition#500", "{{NAME}}"),
        ("org/name", "a name of ModelScope's hub"),
        (f"{HUB}:part", "ms-swift's own register"),
        ("alpaca-zh#500", "a name of ms-swift's register"),
        ("a.jsonl#9 a.jsonl#9", "dataset: a.jsonl: is there 2 times, and here once, random_rows=9"),
    ],
)
def test_data_sets_to_be_looked_at(dataset: str, part: str) -> None:
    """What forge cannot read by the same name, or would read otherwise, is listed."""
    assert any(part in line for line in of(flags=f"--dataset {dataset}").lost)


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--tuner_type full", {"adapter": None, "learning_rate": 1e-5, "lora_dropout": None}),
        ("", {"adapter": "lora", "learning_rate": 1e-4, "lora_r": 8, "lora_dropout": 0.05}),
        ("--train_type lora --use_dora true", {"adapter": "dora"}),
        ("--quant_method bnb --quant_bits 4", {"adapter": "qlora"}),
        ("--quant_method bnb --quant_bits 8", {"adapter": "qlora", "quant_type": "int8"}),
        ("--target_modules q_proj k_proj", {"target_modules": ("q_proj", "k_proj")}),
        ("--target_modules all-linear --init_weights pissa", {"target_modules": None, "init_lora_weights": "pissa"}),
        ("--adapters out/checkpoint", {"adapter_path": "out/checkpoint"}),
        ("--loss_scale last_round", {"train_on": "last"}),
        ("--loss_scale all", {"train_on": "all"}),
        ("--loss_scale default", {"train_on": None}),
        ("--truncation_strategy right --max_length 9", {"on_overflow": "truncate", "max_seq_len": 9}),
        ("--truncation_strategy delete --max_length 9", {"on_overflow": None}),
        ("--deepspeed zero2", {"strategy": "zero2"}),
        ("--deepspeed zero3_offload", {"strategy": "zero3", "cpu_offload": True}),
        ("--deepspeed zero3 --sequence_parallel_size 2", {"strategy": "fsdp2", "cp_size": 2}),
        ("--fsdp fsdp2", {"strategy": "fsdp2"}),
        ("--attn_impl flash_attn --padding_free true", {"attention": None}),
        ("--optimizer muon --tuner_type full", {"optimizer": "muon"}),
        ("--enable_dft_loss true", {"loss": "dft"}),
        ("--columns '{\"q\": \"query\"}'", {"rename_columns": {"q": "query"}}),
        ("--val_dataset v.jsonl --save_steps 40", {"eval_data_path": "v.jsonl", "eval_every_steps": 40}),
        ("--split_dataset_ratio 0.01", {"validation_split": 0.01, "eval_every_steps": 500}),
        ("--split_dataset_ratio 0 --eval_steps 50", {"validation_split": None, "eval_every_steps": None}),
        ("--split_dataset_ratio 0.1 --save_strategy epoch", {"eval_at_epoch": True}),
        ("--freeze_vit false", {"freeze_vision_tower": False}),
        ("--dataset_shuffle false --train_dataloader_shuffle false", {"shuffle": False}),
        ("--dataset_shuffle false", {"shuffle": None}),
        ("--max_epochs 5 --lr_scheduler_type constant", {"num_epochs": 5, "lr_scheduler": "constant"}),
        (
            "--lr_scheduler_type cosine_with_min_lr --learning_rate 1e-4 --lr_scheduler_kwargs '{\"min_lr\": 1e-5}'",
            {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 1e-5 / 1e-4},
        ),
        ("--report_to wandb swanlab --new_special_tokens '<a>' '<b>'", {"add_special_tokens": ("<a>", "<b>")}),
        ("--lora_bias none --packing_strategy binpack --lora_dtype float32 --add_non_thinking_prefix true", {}),
        ("--temperature 0 --max_new_tokens 64 --use_chat_template true --data_seed 42", {}),
    ],
)  # fmt: skip
def test_is_carried_over(flags: str, settings: dict[str, Any]) -> None:
    """Each flag becomes what it is here, and the recipe can be run."""
    found = of(flags=flags)
    assert {name: found.settings.get(name) for name in settings} == settings
    assert lost(found) <= {"report_to", "data_seed"} | ({"dataset"} if "columns" in flags else set())
    if "swanlab" not in flags:
        runs(found)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--loss_scale default+ignore_empty_think", "loss_scale"),
        ("--loss_scale hermes", "loss_scale"),
        ("--truncation_strategy left", "truncation_strategy"),
        ("--truncation_strategy split", "truncation_strategy"),
        ("--packing true", "packing"),
        ("--packing_length 9", "packing_length"),
        ("--tuner_type full --torch_dtype bfloat16", "torch_dtype"),
        ("--torch_dtype float16", "float16"),
        ("--template default", "template"),
        ("--agent_template hermes", "agent_template"),
        ("--quant_method hqq --quant_bits 4", "quant_method"),
        ("--init_weights lora-ga", "peft_init_lora_weights"),
        ("--target_regex x", "target_regex"),
        ("--freeze_parameters_ratio 0.5", "freeze_parameters_ratio"),
        ("--vit_lr 1e-5", "vit_lr"),
        ("--optimizer muonclip", "optimizer"),
        ("--use_galore true", "use_galore"),
        ("--predict_with_generate true", "predict_with_generate"),
        ("--new_special_tokens tokens.txt", "new_special_tokens"),
        ("--model LLM-Research/Llama", "model"),
        ("--ref_adapters r", "ref_adapters"),
        ("--columns text", "columns"),
        ("--moon 3", "moon"),
        ("# comment \\\n --seed 3", "seed"),
    ],
)
def test_what_is_lost_is_listed(flags: str, key: str) -> None:
    """What has no like here, or changes numbers by itself, is listed by its key."""
    assert lost(of(flags=flags)) == {key}


def test_the_system_prompt(tmp_path: Path) -> None:
    """Is that of every verb with conversations, with its line breaks; the name of a file stays one."""
    assert of(flags="--system 'It'\\''s\\nyou.'").settings["system_prompt"] == "It's\nyou."
    assert of("rlhf", "--rlhf_type grpo --system s").settings["system_prompt"] == "s"
    (tmp_path / "system.txt").write_text("Be brief.\n")
    found = of(flags=f"--system {tmp_path / 'system.txt'}")
    assert found.settings["system_prompt"] == f"file:{tmp_path / 'system.txt'}"
    assert "system" not in lost(found)
    assert "system_prompt" not in of("pt", "--system s").settings


def test_images() -> None:
    """What the environment says of images is of the processor here."""
    assert {"MAX_PIXELS", "FPS_MAX_FRAMES"} == lost(of(before="MAX_PIXELS=1003520 FPS_MAX_FRAMES=12 CUDA_VISIBLE_DEVICES=0 "))


RLHF = [
    ("dpo", "", "dpo", {"beta": None, "learning_rate": 1e-4, "lora_dropout": None}),
    ("dpo", "--rpo_alpha 0.1", "dpo", {"loss_type": ("sigmoid", "sft"), "loss_weights": (1.0, 0.1)}),
    ("dpo", "--loss_type sigmoid bco_pair --loss_weights 0.8 0.2", "dpo", {"loss_type": ("sigmoid", "bco_pair")}),
    ("dpo", "--tuner_type full --ref_model org/r", "dpo", {"reference_path": "org/r"}),
    ("dpo", "--adapters a", "dpo", {"adapter_path": "a", "reference": "adapter_off", "lora_r": None}),
    ("kto", "--adapters a --ref_adapters a", "kto", {"adapter_path": "a", "reference": None}),
    ("orpo", "", "orpo", {"learn_prompt": None, "beta": None}),
    ("simpo", "--simpo_gamma 0.7", "simpo", {"gamma": 0.7, "cpo_alpha": 1.0, "beta": None}),
    ("cpo", "--loss_type simpo --beta 2", "simpo", {"cpo_alpha": 1.0, "beta": 2.0}),
    ("kto", "--desirable_weight 2", "kto", {"desirable_weight": 2.0, "rename_columns": {"label": "kto_tag"}}),
    ("rm", "--center_rewards_coefficient 0.01", "reward", {"centering": 0.01}),
    ("ppo", "--reward_model r --response_length 9", "ppo", {"reward_model_path": "r", "max_new_tokens": 9}),
    ("gkd", "--teacher_model org/t --lmbda 0", "distill", {"teacher_path": "org/t", "train_on": "last", "temperature": 0.9}),
    ("gkd", "--teacher_model t", "distill", {"on_policy": 0.5, "max_new_tokens": 512, "temperature": 0.9}),
    ("gkd", "--teacher_model t --lmbda 1 --max_completion_length 9", "distill", {"on_policy": 1, "max_new_tokens": 9}),
    ("gkd", "--teacher_model t --top_p 0.9 --top_k -1", "distill", {"top_p": 0.9, "top_k": None}),
    ("grpo", "", "grpo", {"loss_type": "grpo", "kl_weight": 0.04, "temperature": 0.9, "max_new_tokens": 512}),
    ("grpo", "--beta 0 --importance_sampling_level sequence", "grpo", {"loss_type": "gspo", "clip": 0.2}),
    ("grpo", "--advantage_estimator rloo", "grpo", {"baseline": "leave_one_out", "kl_in_reward": True, "kl_weight": 0.04}),
    ("grpo", "--advantage_estimator rloo --beta 0", "grpo", {"baseline": "leave_one_out", "kl_in_reward": None}),
    ("grpo", "--kl_in_reward true", "grpo", {"baseline": None, "kl_in_reward": True}),
    ("grpo", "--enable_thinking True", "grpo", {"chat_template_kwargs": {"enable_thinking": True}}),
    ("grpo", "--reward_funcs accuracy", "grpo", {"reward": ("trl.rewards:accuracy_reward",)}),
    ("grpo", "--reward_funcs soft_overlong --soft_cache_length 30", "grpo", {"overlong_buffer": 30}),
    (
        "grpo",
        "--num_generations 4 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --steps_per_generation 4",
        "grpo",
        {"effective_batch_size": 8, "updates_per_pass": 2},
    ),
    ("grpo", "--dynamic_sample true --max_resample_times 5", "grpo", {"on_equal_rewards": "resample", "max_resamples": 5}),
    (
        "grpo",
        "--loss_type sapo --tau_pos 2 --overlong_filter true",
        "grpo",
        {"sapo_temperature_pos": 2.0, "mask_truncated": True},
    ),
    ("grpo", "--top_k -1 --epsilon_high 0.3 --delta 2", "grpo", {"top_k": None, "clip_high": 0.3, "dual_clip": 2.0}),
]


@pytest.mark.parametrize(("method", "flags", "verb", "settings"), RLHF)
def test_methods(method: str, flags: str, verb: str, settings: dict[str, Any]) -> None:
    """Each method is a verb, with ms-swift's defaults where forge has others."""
    found = of("rlhf", f"--rlhf_type {method} {flags}", before="NPROC_PER_NODE=1 ")
    assert found.verb == verb
    assert {name: found.settings.get(name) for name in settings} == settings
    known = {"normalize", "effective_batch_size"} | ({"lora_dropout"} if verb == "grpo" else set())
    assert lost(found) <= known
    runs(found)


def test_rlhf_without_a_method_is_dpo() -> None:
    """As there; `swift pt` and tasks have their verbs."""
    assert of("rlhf").verb == "dpo"
    assert of("pt", "--max_length 64").settings["block_size"] == 64
    assert of(flags="--task_type seq_cls --num_labels 2").verb == "classify"
    found = of(flags="--task_type embedding --loss_type infonce")
    assert (found.verb, found.settings["loss"]) == ("embed", "contrastive")
    other = of("rlhf", "--rlhf_type cpo", verb="orpo")
    assert (other.verb, lost(other)) == ("orpo", {"normalize"})
    multi = of(flags="--task_type seq_cls --problem_type multi_label_classification")
    assert multi.settings["rename_columns"] == {"label": "labels"}
    for found in (of("pt", "--max_length 64"), multi):
        runs(found)


@pytest.mark.parametrize(
    ("command", "flags", "error"),
    [
        ("rlhf", "--rlhf_type cpo", "rlhf_type: 'cpo': forge has no such method.*--verb"),
        ("rlhf", "--rlhf_type gkd", "teacher_model: is not given.*forge sdft"),
        ("rlhf", "--rlhf_type gkd --model t --teacher_model t", "teacher_model: 't' is the model that learns.*forge sdft"),
        ("rlhf", "--rlhf_type grpo --teacher_model t", "teacher_model: with rlhf_type grpo"),
        ("sft", "--task_type reranker", "forge has no rerankers"),
        ("sft", "--task_type seq_cls --problem_type regression", "regression"),
        ("sft", "--tuner_type reft", "tuner_type: 'reft': forge has no such way of training"),
        ("sft", "--sft_type lora", "sft_type: is of ms-swift 2"),
        ("sft", "--columns '{\"a\"'", "columns: .* is no JSON"),
    ],
)
def test_what_forge_has_not_is_refused(command: str, flags: str, error: str) -> None:
    """By its name, with what to do."""
    with pytest.raises(forge.RecipeError, match=error):
        of(command, flags)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("swift infer --model m\n", "calls swift infer, which trains nothing.*forge generate"),
        ("megatron sft --model m\n", "calls megatron"),
        ("swift export --model m\nmegatron rlhf --model m\n", "calls megatron"),
        ("echo hello\n", "calls no training of ms-swift"),
        ("swift sft --model a\nswift rlhf --model b\n", r"trains 2 times \(swift sft, swift rlhf\)"),
        (
            "for seed in 1 2 3; do swift sft --model a --seed $seed; done\n",
            r"trains 3 times \(swift sft\).*of a loop one value",
        ),
        ("swift sft train.yaml\n", "its flags stand in train.yaml: convert that file"),
        ("swift sft --model 'a\n", r"train\.sh: cannot be read as a shell script: line 1: a quote .* not closed"),
    ],
)
def test_scripts_of_which_there_is_no_recipe(script: str, error: str, tmp_path: Path) -> None:
    """One error that says what the script is, and nothing is written."""
    file = tmp_path / "train.sh"
    file.write_text(script)
    with pytest.raises(forge.RecipeError, match=error):
        convert_file(file, output=tmp_path / "recipe.yaml")
    assert not (tmp_path / "recipe.yaml").exists()


def test_a_script_becomes_a_file(tmp_path: Path) -> None:
    """The command line writes a recipe that `forge config validate` takes."""
    (tmp_path / "train.sh").write_text(SCRIPT)
    said = convert_file(tmp_path / "train.sh", output=tmp_path / "recipe.yaml")
    assert "a recipe for forge sft, 17 settings from ms-swift's train.sh" in said

    assert "a recipe for forge sft" in validate(tmp_path / "recipe.yaml")


def test_a_script_is_known_by_what_it_calls() -> None:
    """A model that only a running shell knows is left open, and the script is no other library's."""
    found = converted("swift sft $MODEL --dataset a.jsonl --max_steps 3 \\\n\n")
    assert (found.library, lost(found)) == ("ms-swift", {"$MODEL"})
    assert "model_path" not in found.settings


def test_an_args_json_is_its_script(tmp_path: Path) -> None:
    """What an args.json holds by default, or for swift itself, is left out; the rest becomes the recipe of the script."""
    own = {
        "model": "org/m", "dataset": ["a.jsonl"], "output_dir": "/data/output/v0-2026", "tuner_type": "lora", "lora_rank": 4,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "learning_rate": 1e-4, "max_length": 512,
        "torch_dtype": "bfloat16", "target_modules": ["all-linear"], "eval_strategy": "no", "eval_steps": None,
    }  # fmt: skip
    inside = {
        "swift_version": "4.6.0", "rank": 0, "global_world_size": 2, "local_world_size": 2, "model_suffix": "m",
        "model_info": "ModelInfo(...)", "training_args": "Seq2SeqTrainingArguments(...)", "hub": "<class>", "deepspeed": None,
        "template": "qwen", "model_kwargs": {}, "evaluation_strategy": "no", "logging_dir": "/data/output/v0-2026/runs",
        "model_type": "qwen2",
    }  # fmt: skip
    (tmp_path / "args.json").write_text(json.dumps({**DEFAULTS, **inside, **own}))
    recipe = yaml.safe_load(convert_file(tmp_path / "args.json"))
    script = of(
        flags="--lora_rank 4 --per_device_train_batch_size 2 --gradient_accumulation_steps 3 --learning_rate 1e-4"
        " --max_length 512 --torch_dtype bfloat16",
        before="NPROC_PER_NODE=2 ",
    )
    wanted = {**script.settings, "ckpt_output_dir": "/data/output/v0-2026", "verb": "sft"}
    assert recipe == wanted
    assert "Not carried over, to be looked at" not in convert_file(tmp_path / "args.json")


OURS = {
    "adam_beta2": "beta2", "lr_scheduler_type": "lr_scheduler", "lora_rank": "lora_r", "freeze_vit": "freeze_vision_tower",
    "freeze_aligner": "freeze_multi_modal_projector", "freeze_llm": "freeze_language_model",
    "bnb_4bit_quant_type": "quant_type",
    "bnb_4bit_use_double_quant": "double_quant", "simpo_gamma": "gamma", "max_completion_length": "max_new_tokens",
    "num_ppo_epochs": "num_iterations", "kl_coef": "kl_weight", "vf_coef": "value_weight", "cliprange_value": "value_clip",
    "ref_model_sync_steps": "reference_sync_steps", "ref_model_mixup_alpha": "reference_mixup",
    "tau_pos": "sapo_temperature_pos",
    "tau_neg": "sapo_temperature_neg", "dataset_shuffle": "shuffle",
}  # fmt: skip
COMMON = ("TrainArgumentsMixin", "BaseArguments", "DataArguments", "TunerArguments", "QuantizeArguments")
COMPUTED = {
    *("per_device_train_batch_size", "beta", "rlhf_type", "loss_scale"),  # by verb, in the tests above
    *(
        "top_k",
        "scale_rewards",
        "lorap_lr_ratio",
        "target_modules",
        "importance_sampling_level",
    ),  # ours has another word for it
    *("packing", "init_weights", "use_dora", "use_rslora", "gradient_accumulation_steps", "router_aux_loss_coef"),
}


@pytest.mark.parametrize(
    ("verb", "script", "classes"),
    [
        ("sft", "sft --quant_bits 4", COMMON),
        ("dpo", "rlhf --tuner_type full", (*COMMON, "RLHFArguments")),
        ("simpo", "rlhf --rlhf_type simpo", (*COMMON, "RLHFArguments")),
        ("kto", "rlhf --rlhf_type kto", (*COMMON, "RLHFArguments")),
        ("ppo", "rlhf --rlhf_type ppo --reward_model r", (*COMMON, "RLHFArguments", "PPOArguments")),
        ("grpo", "rlhf --rlhf_type grpo", (*COMMON, "RLHFArguments", "RolloutTrainerArgumentsMixin", "GRPOArguments")),
        ("distill", "rlhf --rlhf_type gkd --teacher_model t", (*COMMON, "RLHFArguments")),
    ],
)
def test_a_script_without_flags_becomes_their_defaults(verb: str, script: str, classes: tuple[str, ...]) -> None:
    """Whatever a script leaves out, recipe and forge's defaults together say what ms-swift would do."""
    found = converted(f"swift {script} --model m --dataset a.jsonl \\\n\n")
    assert found.verb == verb
    fields = {field.name: field for _, field in flat_fields(task_of(verb).settings)}
    settings = {name: field.default for name, field in fields.items()} | found.settings
    dropout_off = verb in ("dpo", "simpo", "kto", "ppo", "grpo", "distill")
    checked = set()
    for name in classes:
        for theirs, value in next(each[name] for each in TABLE.values() if name in each).items():
            ours = OURS.get(theirs, theirs)
            if theirs in COMPUTED or ours not in settings or value is None:
                continue
            if theirs == "lora_dropout" and dropout_off:
                value = 0.0  # as their trainers have it
            if theirs.startswith("lora_") and settings["adapter"] == "none":
                continue
            assert settings[ours] == value, theirs
            checked.add(theirs)
    assert {"weight_decay", "adam_beta2", "lr_scheduler_type", "seed", "dataset_shuffle"} <= checked


def test_every_argument_of_the_table_is_known() -> None:
    """The defaults of args.json are those of the release that the table was read from."""
    for classes in TABLE.values():
        for name, rows in classes.items():
            if name in ("SftArguments", "RLHFArguments", "PretrainArguments"):
                continue
            wrong = {field: value for field, value in rows.items() if value and DEFAULTS.get(field) != value}
            assert not wrong, name


@given(
    st.sampled_from(sorted({*DEFAULTS, "dataset", "model", "deepspeed", "columns", "ENV", "lmbda", "reward_model"})), st.data()
)
def test_values_of_any_kind(key: str, data: st.DataObject) -> None:
    """No value of any key ends the conversion in anything but a list, or one error."""
    value = data.draw(st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.text(max_size=5),
                                st.lists(st.text(max_size=3), max_size=2), st.just({"a": [1]}),
                                st.just([{"a": 1}])))  # fmt: skip
    try:
        values = {"model": "m", "tuner_type": "lora", "dataset": ["a"], key: value}
        found = converted(json.dumps(values), library="ms-swift", verb="grpo")
    except forge.RecipeError:
        return
    assert found.verb == "grpo"


def test_adapters_beside_lora() -> None:
    """vera is PEFT's; of fourierft what ms-swift has otherwise is written out, but for where its coefficients begin."""
    found = converted("model: m\ntuner_type: vera\nvera_rank: 64\nlora_rank: 8\n")
    assert {found.settings[name] for name in ("adapter", "vera_rank")} == {"vera", 64}
    assert "lora_r" not in found.settings
    found = converted("model: m\ntuner_type: fourierft\nfourier_scaling: 150\n")
    assert {name: found.settings[name] for name in ("adapter", "fourier_n_frequency", "fourier_scaling")} == {
        "adapter": "fourierft",
        "fourier_n_frequency": 2000,
        "fourier_scaling": 150,
    }
    assert "tuner_type" in lost(found)

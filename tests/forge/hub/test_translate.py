"""Calls of training_hub: what each is in forge, and what is refused with what to write instead."""

import inspect
import json
from importlib.metadata import EntryPoint

import attrs
import pytest

import forge
import forge.hub
from forge import SettingsError
from forge.hub import AlgorithmRegistry, TrainingHubCallback, create_algorithm, translate
from forge.hub._parameter import REQUIRED
from forge.hub._table import FUNCTIONS, REFUSED
from forge.hub._tool_calls import call_prompts, tool_call
from forge.hub._translate import signature
from forge.hub._values import unused_folder
from forge.settings import _backends as backends
from forge.settings._settings import flat_fields, resolve

PATHS = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o"}
OSFT = {
    "unfreeze_rank_ratio": 0.25,
    "effective_batch_size": 16,
    "max_tokens_per_gpu": 64,
    "max_seq_len": 64,
    "learning_rate": 1e-5,
}
CALLS = {"sft": PATHS, "osft": {**PATHS, **OSFT}, "lora_sft": PATHS, "grpo": PATHS, "lora_grpo": PATHS, "embedding_sft": PATHS}

# Its signatures, in order (training_hub 0.11.2): a call by position means there what it means here.
SIGNATURES = {
    "sft": """model_path data_path ckpt_output_dir backend num_epochs effective_batch_size learning_rate max_seq_len
        max_tokens_per_gpu data_output_dir save_samples warmup_steps accelerate_full_state_at_epoch checkpoint_at_epoch
        is_pretraining block_size document_column_name beta1 beta2 eps weight_decay nproc_per_node nnodes node_rank rdzv_id
        rdzv_endpoint master_addr master_port wandb_project wandb_entity wandb_run_name tensorboard_log_dir
        mlflow_tracking_uri mlflow_experiment_name mlflow_run_name callbacks enable_jit_checkpoint checkpoint_storage""",
    "osft": """model_path data_path unfreeze_rank_ratio effective_batch_size max_tokens_per_gpu max_seq_len learning_rate
        ckpt_output_dir data_output_dir backend target_patterns seed use_liger use_processed_dataset unmask_messages
        is_pretraining block_size document_column_name lr_scheduler warmup_steps lr_scheduler_kwargs beta1 beta2 eps
        weight_decay checkpoint_at_epoch save_final_checkpoint num_epochs nproc_per_node nnodes node_rank rdzv_id
        rdzv_endpoint master_port master_addr wandb_project wandb_entity wandb_run_name tensorboard_log_dir
        mlflow_tracking_uri mlflow_experiment_name mlflow_run_name trust_remote_code callbacks enable_jit_checkpoint
        checkpoint_storage""",
    "lora_sft": """model_path data_path ckpt_output_dir backend lora_r lora_alpha lora_dropout target_modules num_epochs
        effective_batch_size micro_batch_size gradient_accumulation_steps learning_rate max_seq_len lr_scheduler warmup_steps
        load_in_4bit load_in_8bit bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_use_double_quant flash_attention
        sample_packing bf16 fp16 tf32 save_steps eval_steps logging_steps save_total_limit wandb_project wandb_entity
        wandb_run_name tensorboard_log_dir mlflow_tracking_uri mlflow_experiment_name mlflow_run_name dataset_type
        field_messages field_instruction field_input field_output nproc_per_node nnodes node_rank rdzv_id rdzv_endpoint
        master_addr master_port enable_model_splitting finetune_vision_layers finetune_language_layers trust_remote_code
        callbacks eval_data_path per_device_eval_batch_size enable_jit_checkpoint checkpoint_storage""",
    "lora_grpo": """model_path ckpt_output_dir data_path data_config n_train n_val rollout_fn tasks reward_fn num_iterations
        group_size prompt_batch_size learning_rate temperature max_tokens max_prompt_length concurrency lora_r lora_alpha
        target_modules max_grad_norm gpu_memory_utilization max_lora_rank enforce_eager n_gpus nnodes tensor_parallel_size
        use_dr_grpo backend iteration_callback wandb_project wandb_entity wandb_run_name mlflow_tracking_uri
        mlflow_experiment_name mlflow_run_name""",
    "grpo": """model_path ckpt_output_dir data_path data_config n_train n_val reward_fn num_iterations group_size
        prompt_batch_size learning_rate temperature max_tokens max_prompt_length gpu_memory_utilization n_gpus nnodes
        tensor_parallel_size use_dr_grpo iteration_callback wandb_project wandb_entity wandb_run_name mlflow_tracking_uri
        mlflow_experiment_name mlflow_run_name""",
    "embedding_sft": """model_path data_path ckpt_output_dir backend loss_type loss_fn num_epochs batch_size learning_rate
        warmup_ratio batch_sampler eval_data_path text_column label_column seed""",
}


def known(verb):
    """The settings of a verb."""
    return {field.name for _, field in flat_fields(getattr(forge, verb).task.settings)}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_signatures(function):
    """Every name in training_hub's order; None or its own value by default."""
    names = [*SIGNATURES[function].split(), "kwargs"]
    assert list(signature(function).parameters) == names
    assert list(inspect.signature(getattr(forge.hub, function)).parameters) == names


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_default_is_a_setting(function):
    """A call with the required parameters alone is complete, and valid to the last setting."""
    call = translate(function, **CALLS[function])
    assert set(call.settings) <= known(call.verb)
    resolve(getattr(forge, call.verb).task.settings, ("argument", call.settings))


@pytest.mark.parametrize(
    ("function", "name"), [(function, each.name) for function, table in FUNCTIONS.items() for each in table]
)
def test_every_parameter_has_an_effect_or_is_refused(function, name):
    """Some value of each parameter changes the settings, is refused by its name with what to do, or is said to do nothing."""
    parameter = next(each for each in FUNCTIONS[function] if each.name == name)
    plain = translate(function, **CALLS[function])
    beside = BESIDE.get(name, {})
    base = translate(function, **{**CALLS[function], **beside}) if beside and name not in beside else plain
    for value in VALUES.get(name, ("x1", 3, True, False, 0.5)):
        try:
            call = translate(function, **{**CALLS[function], **beside, name: value})
        except SettingsError as error:
            if name in str(error) and (parameter.refused or name in CHECKED):
                return
            continue
        said = unused_folder({name: value}) or ""
        if call != base or said.startswith(name):
            assert not parameter.refused or value not in parameter.neutral
            return
    pytest.fail("nothing that it may be changes anything")


VALUES = {
    "callbacks": ([TrainingHubCallback()],),
    "block_size": (64,),
    "lr_scheduler_kwargs": ({"power": 2.0},),
    "adamw_betas": ((0.8, 0.9),),
    "dataset_type": ("alpaca",),
    "reward_fn": ("rewards:short",),
    "num_iterations": (7,),
    "use_dr_grpo": (False,),
    "use_processed_dataset": (True,),
    "process_data": (False,),
    "document_column_name": ("pages",),
    "rdzv_id": (7,),
    "max_lora_rank": (3,),
    "nproc_per_node": (3,),
    "finetune_language_layers": (False,),
    "save_final_checkpoint": (False,),
    "is_padding_free": (False,),
    "osft": (False,),
    "loss_type": ("mnrl",),
    "batch_sampler": ("default",),
}
"""Values that a parameter must have to be seen."""
BESIDE = {
    "is_pretraining": {"block_size": 64, "is_pretraining": True},
    "block_size": {"is_pretraining": True, "block_size": 32},
    "document_column_name": {"is_pretraining": True, "block_size": 64},
    "bnb_4bit_quant_type": {"load_in_4bit": True},
    "bnb_4bit_compute_dtype": {"load_in_4bit": True},
    "bnb_4bit_use_double_quant": {"load_in_4bit": True},
    "eval_steps": {"eval_data_path": "e"},
    "batch_sampler": {"loss_type": "mnrl"},
}
CHECKED = {"max_lora_rank"}
"""Parameters of which some values are refused, and no setting of forge is made."""


def test_none_is_left_out():
    """None stands for the default, as everywhere in training_hub; what is refused is refused for other values only."""
    everything = {each.name: None for each in FUNCTIONS["sft"] if each.default is not REQUIRED}
    assert translate("sft", **{**everything, **PATHS}) == translate("sft", **PATHS)


def test_unknown_names():
    """A name that nobody has is refused with the nearest one; other libraries' with what they are; settings of forge pass."""
    with pytest.raises(SettingsError, match=r"sft: unknown parameter 'num_epoch'.*did you mean `num_epochs`\?"):
        translate("sft", **PATHS, num_epoch=2)
    with pytest.raises(SettingsError, match="here it is `learning_rate`"):
        translate("sft", **PATHS, lr=2)
    assert translate("sft", **PATHS, keep_last_checkpoint_only=True).settings["keep_last_checkpoint_only"] is True
    with pytest.raises(SettingsError, match="model_path, ckpt_output_dir are required"):
        translate("sft", data_path="d")
    with pytest.raises(SettingsError, match="lora_sft: multiple values for argument 'model_path'"):
        forge.hub.lora_sft("m", model_path="m")


@pytest.mark.parametrize(
    ("function", "given", "why"),
    [
        ("sft", {"block_size": 8}, "block_size has no effect without is_pretraining"),
        ("sft", {"document_column_name": "x"}, "document_column_name has no effect without is_pretraining"),
        ("sft", {"is_pretraining": True}, "block_size is required"),
        ("osft", {"is_pretraining": True, "block_size": 8, "unmask_messages": True}, "exclude each other"),
        ("osft", {"is_pretraining": True, "block_size": 128}, "max_seq_len=64 has no effect with is_pretraining"),
        ("sft", {"trust_remote_code": True}, "no code of a model is run"),
        ("sft", {"enable_jit_checkpoint": False}, "a signal saves the state in any case"),
        ("sft", {"chat_tmpl_path": "granite.py"}, "a Python module is code"),
        ("sft", {"adamw_betas": 3}, "two numbers"),
        ("osft", {"lr_scheduler_kwargs": {"gamma": 2}}, "'gamma' is not available"),
        ("osft", {"lr_scheduler_kwargs": 3}, "mapping"),
        ("osft", {"save_final_checkpoint": False}, "a run ends with its model"),
        ("osft", {"osft": False}, "call sft"),
        ("sft", {"backend": "trl", "enable_jit_checkpoint": True}, "no effect with backend=trl: it saves no full states"),
        (
            "sft",
            {"backend": "instructlab-training", "accelerate_full_state_at_epoch": True},
            "accelerate_full_state_at_epoch=True has no effect with backend=instructlab-training: a run that was stopped",
        ),
        ("osft", {"backend": "mini-trainer", "on_demand_checkpointing": True}, "on_demand_checkpointing=True has no effect"),
        ("sft", {"use_liger": "no"}, "use_liger must be True or False"),
        ("lora_sft", {"load_in_8bit": True, "load_in_4bit": True}, "load_in_4bit and load_in_8bit are adapters of their own"),
        ("lora_sft", {"load_in_8bit": True, "bnb_4bit_quant_type": "nf4"}, "has no effect without load_in_4bit"),
        ("lora_sft", {"load_in_4bit": True, "use_dora": True}, "adapters of their own"),
        ("lora_sft", {"bnb_4bit_quant_type": "nf4"}, "bnb_4bit_quant_type has no effect without load_in_4bit"),
        ("lora_sft", {"bf16": True, "load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}, "one dtype"),
        ("lora_sft", {"effective_batch_size": 8, "micro_batch_size": 2}, "micro_batch_size has no effect beside"),
        ("lora_sft", {"nproc_per_node": "auto"}, "effective_batch_size is required where .* is 'auto'"),
        ("lora_sft", {"micro_batch_size": -1}, "is -1, and no number of 1 or more"),
        ("sft", {"is_pretraining": "yes"}, "is_pretraining must be True or False"),
        ("lora_sft", {"load_in_4bit": "no"}, "load_in_4bit must be True or False"),
        ("lora_grpo", {"max_lora_rank": "x"}, "max_lora_rank"),
        ("lora_sft", {"eval_steps": 5}, "eval_steps has no effect without eval_data_path"),
        ("lora_sft", {"fp16": True}, "float16 overflows"),
        ("lora_grpo", {"reward_fn": len}, "a reward is named"),
        ("lora_grpo", {"rollout_fn": len}, "completions answer prompts"),
        ("lora_grpo", {"n_train": 10}, "every row is taken"),
        ("grpo", {"tensor_parallel_size": 2}, "completions come from the model that trains"),
        ("grpo", {"iteration_callback": len}, "callbacks="),
        ("sft", {"max_batch_len": 3, "max_tokens_per_gpu": 4}, "give one"),
        ("embedding_sft", {"loss_type": "batch_hard_triplet"}, "the hardest among them"),
        ("embedding_sft", {"loss_type": "cosine"}, "there are batch_all_triplet and mnrl"),
        ("embedding_sft", {"loss_fn": len}, "a loss is named"),
        ("embedding_sft", {"batch_sampler": "group_by_label"}, "drawn from all rows"),
        ("embedding_sft", {"batch_sampler": "no_duplicates"}, "not available with triplets"),
        ("embedding_sft", {"loss_type": "mnrl", "text_column": "sentence"}, "whose rows are pairs"),
        ("embedding_sft", {"label_column": 3}, "label_column must be the name of a column"),
    ],
)  # fmt: skip
def test_refusals(function, given, why):
    """Each says what to write instead."""
    with pytest.raises(SettingsError, match=why):
        translate(function, **{**CALLS[function], **given})


@pytest.mark.parametrize(
    ("function", "given", "why"),
    [
        ("lora_sft", {"field_messages": "a", "field_instruction": "a"}, "rename_columns of 'a' to be 'instruction'"),
        ("lora_sft", {"field_messages": ["a"]}, "field_messages must be the name of a column"),
        ("sft", {"is_pretraining": True, "block_size": 8, "document_column_name": ["a"]}, "document_column_name must be"),
        ("osft", {"lr_scheduler_kwargs": {"min_lr_ratio": 0.1, "min_lr_rate": 0.2}}, "both say min_lr_ratio"),
    ],
)
def test_nothing_is_left_out_in_silence(function, given, why):
    """Two parameters that say one thing differently; and values that are no names."""
    with pytest.raises(SettingsError, match=why):
        translate(function, **CALLS[function], **given)


def test_names_that_are_none():
    """One clear error, of a rank that is a text too."""
    with pytest.raises(SettingsError, match="an algorithm is named by a text"):
        create_algorithm(["sft"])
    with pytest.raises(SettingsError, match="backend must be a backend or its name"):
        forge.hub.sft(**PATHS, backend=["x"])
    assert translate("lora_grpo", **PATHS, max_lora_rank=64, lora_r="8").settings["lora_r"] == "8"


@pytest.mark.parametrize(
    ("function", "given", "settings"),
    [
        ("sft", {}, {"num_epochs": 1, "checkpoint_at_epoch": True, "backend": "forge"}),
        ("sft", {"max_steps": 4}, {"max_steps": 4}),
        ("sft", {"nnodes": 2, "node_rank": 1, "rdzv_id": 100, "rdzv_endpoint": "h:1"}, {"node_rank": 1, "rdzv_id": "100"}),
        ("sft", {"data_output_dir": "o/data", "enable_jit_checkpoint": True}, {"ckpt_output_dir": "o"}),
        ("sft", {"use_liger": True}, {"kernels": "liger"}),
        ("osft", {"use_liger": False}, {}),
        ("sft", {"disable_flash_attn": True, "process_data": False}, {"attention": "documents", "data_format": "tokenised"}),
        ("sft", {"adamw_betas": (0.8, 0.9), "random_seed": 3}, {"beta1": 0.8, "beta2": 0.9, "seed": 3}),
        ("osft", {"unmask_messages": True, "target_patterns": ["q"]}, {"train_on": "all", "target_modules": ["q"]}),
        ("osft", {"lr_scheduler": "constant_with_warmup"}, {"lr_scheduler": "constant"}),
        ("osft", {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, {"min_lr_ratio": 0.1}),
        ("osft", {"learning_rate": 0.5, "lr_scheduler_kwargs": {"min_lr": 0.25}}, {"min_lr_ratio": 0.5}),
        ("lora_sft", {"optimizer": "adafactor"}, {"beta2": None}),
        ("lora_sft", {}, {"effective_batch_size": 2, "lora_alpha": 32, "beta2": 0.999, "adapter": "lora"}),
        ("lora_sft", {"gradient_accumulation_steps": 3, "nproc_per_node": 2, "nnodes": 2}, {"effective_batch_size": 24}),
        ("lora_sft", {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}, {"adapter": "qlora", "dtype": "bfloat16"}),
        ("lora_sft", {"load_in_8bit": True, "bf16": True}, {"adapter": "qlora", "quant_type": "int8", "dtype": "bfloat16"}),
        ("lora_sft", {"load_in_8bit": False}, {"adapter": "lora"}),
        ("lora_sft", {"field_input": "a", "field_output": "b"}, {"rename_columns": {"a": "input", "b": "output"}}),
        ("lora_sft", {"eval_data_path": "e"}, {"eval_every_steps": 500}),
        ("lora_grpo", {}, {"num_epochs": 15, "loss_type": "dr_grpo", "scale_rewards": "none", "lora_alpha": 8}),
        ("lora_grpo", {"backend": "art"}, {"max_steps": 15, "kl_weight": None}),
        ("lora_grpo", {"use_dr_grpo": False}, {"loss_type": "grpo", "scale_rewards": "group", "kl_weight": 0.01}),
        ("grpo", {"use_dr_grpo": False, "kl_weight": 0.0}, {"kl_weight": 0.0}),
        ("sft", {"backend": "trl"}, {"backend": "trl", "checkpoint_at_epoch": None}),
        ("lora_sft", {"backend": "trl"}, {"keep_last_n": None, "full_state_every_steps": None, "max_grad_norm": 0.3}),
        ("embedding_sft", {}, {"loss": "batch_all_triplet", "num_epochs": 20, "effective_batch_size": 32, "warmup_ratio": 0.1}),
        ("embedding_sft", {"warmup_ratio": 0.2}, {"warmup_ratio": 0.2}),
        ("embedding_sft", {"backend": "sentence-transformers", "warmup_ratio": 0}, {"lr_scheduler": "linear", "beta2": 0.999}),
        ("embedding_sft", {"loss_type": "mnrl"}, {"loss": "contrastive", "exclude_same_text": True}),
        ("embedding_sft", {"loss_type": "mnrl", "batch_sampler": "default"}, {"exclude_same_text": False}),
        ("embedding_sft", {"text_column": "a", "label_column": "b"}, {"rename_columns": {"a": "text", "b": "label"}}),
        ("embedding_sft", {"eval_data_path": "e", "warmup_steps": 5}, {"warmup_steps": 5, "warmup_ratio": None}),
        ("grpo", {"n_gpus": 4, "reward_fn": "r:f"}, {"nproc_per_node": 4, "reward": ("r:f",), "max_new_tokens": 512}),
    ],
)  # fmt: skip
def test_translations(function, given, settings):
    """What a call becomes."""
    found = translate(function, **{**CALLS[function], **given}).settings
    assert {name: found.get(name) for name in settings} == settings


def test_pretraining():
    """Documents become forge pretrain, under OSFT too; blocks, the column and the adapter go along."""
    call = translate("osft", **CALLS["osft"], is_pretraining=True, block_size=32, document_column_name="page")
    assert call.verb == "pretrain"
    assert {"block_size": 32, "rename_columns": {"page": "text"}, "adapter": "osft"}.items() <= call.settings.items()
    assert "max_seq_len" not in call.settings
    assert (
        "rename_columns"
        not in translate("sft", **PATHS, is_pretraining=True, block_size=8, document_column_name="document").settings
    )


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_there_are_not(name):
    """gepa says what to use."""
    with pytest.raises(SettingsError, match=name.partition("_")[0]):
        getattr(forge.hub, name)(model_path="m")
    for call in (create_algorithm, translate):
        with pytest.raises(SettingsError, match=name.partition("_")[0]):
            call(name)
    with pytest.raises(SettingsError, match="no function 'nothing'; known are sft"):
        translate("nothing")


class Watcher(TrainingHubCallback):
    """Every hook that is called, with step and epoch."""

    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda context: self.seen.append((name, context.step, context.epoch))
        return super().__getattribute__(name)


def test_callbacks():
    """Hooks are called in training_hub's order, with an object that keeps its state; those that never would be are refused."""
    watcher = Watcher()
    (adapted,) = translate("sft", **PATHS, callbacks=watcher).callbacks
    adapted.on_evaluation({"step": 0, "eval_loss": 3.0})
    for step, epoch in ((1, 0), (2, 0), (3, 1)):
        adapted.on_step({"step": step, "epoch": epoch, "loss": 2.0, "lr": 0.1})
    adapted.on_end(type("Result", (), {"steps": 3, "loss": 2.0, "output_dir": "o"})())
    names = [name.removeprefix("on_") for name, _, _ in watcher.seen]
    assert names == (
        "train_begin evaluate epoch_begin log step_end log step_end epoch_end "
        "epoch_begin log step_end epoch_end train_end".split()
    )
    assert ("on_epoch_end", 2, 0) in watcher.seen

    class Saver(TrainingHubCallback):
        def on_save(self, context):
            """Never called."""

    with pytest.raises(SettingsError, match="Saver.on_save would never be called"):
        translate("sft", **PATHS, callbacks=[Saver()])


def test_registry():
    """Algorithms and backends by name; forge's own backend comes first; what is added is found."""
    assert AlgorithmRegistry.list_algorithms() == ["sft", "osft", "lora_sft", "lora_grpo", "grpo", "embedding_sft"]
    assert AlgorithmRegistry.list_backends("sft")[0] == "forge"
    assert AlgorithmRegistry.list_backends("nothing") == []
    assert forge.hub.Backend is forge.backends.Backend
    with pytest.raises(SettingsError, match="no algorithm 'sftt'"):
        create_algorithm("sftt")
    with pytest.raises(SettingsError, match="no backend 'forg'"):
        create_algorithm("sft", "forg")
    with pytest.raises(SettingsError, match="backend must be a backend or its name"):
        forge.hub.SFTAlgorithm(backend=forge.backends.Backend)
    algorithm = create_algorithm("osft")
    assert set(algorithm.get_required_params()) == {*PATHS, *OSFT}
    assert "seed" in algorithm.get_optional_params()


@pytest.mark.parametrize(
    ("algorithm", "backend", "name"),
    [
        (forge.hub.SFTAlgorithm, forge.hub.InstructLabTrainingSFTBackend, "instructlab-training"),
        (forge.hub.OSFTAlgorithm, forge.hub.MiniTrainerOSFTBackend, "mini-trainer"),
    ],
)
def test_an_injected_backend(algorithm, backend, name, monkeypatch):
    """`SFTAlgorithm(backend=InstructLabTrainingSFTBackend())` asks for that trainer, as does its name."""
    function, seen = algorithm.function, []
    task = getattr(forge, function).task
    verb = type("Verb", (), {"task": task, "__call__": lambda _, **settings: seen.append(settings)})
    monkeypatch.setattr(forge, function, verb())
    algorithm(backend=backend()).train(**CALLS[function])
    create_algorithm(function, name).train(**CALLS[function])
    getattr(forge.hub, function)(**CALLS[function], backend=name)
    assert [settings["backend"] for settings in seen] == [name] * 3
    assert seen[0] == seen[1] == seen[2]
    assert name in AlgorithmRegistry.list_backends(function)


@attrs.frozen(kw_only=True)
class OthersSettings:
    """What another trainer has of its own."""

    use_liger_kernels: bool = False
    disable_flash_attn: bool = False


class Other(forge.backends.Backend):
    """Another trainer."""

    name = "other"
    Settings = OthersSettings

    def capabilities(self):
        """Return that it has everything."""
        return forge.backends.Capabilities()

    def execute_training(self, params):
        """Return what it was given."""
        return params


def test_a_folder_for_tokens_is_taken(monkeypatch, capsys):
    """training_hub's examples have `data_output_dir="/dev/shm"`: the run is as without it, and one line says so."""
    monkeypatch.setattr("forge.backends._train.train", lambda _task, settings, *_: settings)
    plain = forge.hub.sft(**PATHS)
    assert capsys.readouterr().err == ""
    assert forge.hub.sft(**PATHS, data_output_dir="/dev/shm") == plain
    assert capsys.readouterr().err.startswith("data_output_dir='/dev/shm' has no effect: tokens lie in o/data,")
    for same in ("o/data", "o"):
        assert forge.hub.sft(**PATHS, data_output_dir=same) == plain
    monkeypatch.setenv("RANK", "1")
    forge.hub.sft(**PATHS, data_output_dir="/dev/shm")
    assert capsys.readouterr().err == ""


def test_settings_of_a_backend(monkeypatch):
    """What a backend has of its own is passed to it, under the name that it has there."""
    monkeypatch.setitem(backends._SHIPPED, "other", EntryPoint("other", f"{__name__}:Other", backends.GROUP))
    call = translate("sft", **PATHS, backend="other", disable_flash_attn=True, use_liger=True)
    assert {"backend": "other", "disable_flash_attn": True, "use_liger_kernels": True}.items() <= call.settings.items()
    assert "attention" not in call.settings
    assert "other" in AlgorithmRegistry.list_backends("sft")
    params = create_algorithm("sft", "other").train(**PATHS, use_liger=True)
    assert params["verb"] == "sft"
    assert params["use_liger_kernels"] is True
    assert params["num_epochs"] == 1


TRACE = {
    "messages": [
        {"role": "user", "content": "weather in Bonn?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Bonn", "days": "2"}'}}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ],
    "tools": [{"type": "function", "function": {"name": "weather"}}],
}


def test_tool_calls():
    """A trace becomes a prompt a call; 1 for the call, 0.5 for another argument, 0 for another tool or none."""
    (prompt,) = call_prompts(TRACE)
    assert prompt["prompt"] == TRACE["messages"][:1]
    assert prompt["tools"] == TRACE["tools"]
    texts = [
        '<tool_call>{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}</tool_call>',
        'I ask. {"name": "weather", "parameters": {"city": "Ulm"}}',
        '{"name": "time", "arguments": {}}',
        "no idea {",
    ]
    columns = {name: [prompt[name]] * 5 for name in ("expected_name", "expected_arguments")}
    said = [[{"role": "assistant", "content": text}] for text in texts] + [[TRACE["messages"][1]]]
    assert tool_call([None] * 5, said, **columns) == [1.0, 0.5, 0.0, 0.0, 1.0]
    assert call_prompts({"messages": []}) == []
    assert json.loads(prompt["expected_arguments"]) == {"city": "Bonn", "days": "2"}

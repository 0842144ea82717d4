"""Value of a parameter of training_hub → settings of forge, where it is more than a name."""

from __future__ import annotations

from typing import Any

from forge._errors import SettingsError
from forge.hub._parameter import Given, Taken

_COLUMN = "document"
"""Column of documents where `document_column_name` is left out; forge finds it by itself."""


def rdzv_id(value: Any, _given: Given) -> Taken:
    """Take a number as the name that it is."""
    return {"rdzv_id": value if isinstance(value, str) else str(value)}


def data_output_dir(_value: Any, _given: Given) -> Taken:
    """Take any folder of tokens, which changes nothing that is trained."""
    return {}


def unused_folder(given: Given) -> str | None:
    """Say where the tokens of a run lie if a call asks for another folder."""
    folder, out = (str(given.get(name)).rstrip("/") for name in ("data_output_dir", "ckpt_output_dir"))
    if given.get("data_output_dir") is None or folder in (out, f"{out}/data"):
        return None
    return f"data_output_dir={folder!r} has no effect: tokens lie in {out}/data, mapped into memory, where a resume finds them"


def is_pretraining(value: Any, given: Given) -> Taken:
    """Ask for blocks of documents."""
    if not value:
        return {}
    if given.get("block_size") is None:
        raise SettingsError("block_size is required with is_pretraining=True: give the tokens of a block.")
    if given.get("unmask_messages"):
        raise SettingsError("unmask_messages and is_pretraining exclude each other: documents have no messages.")
    return {}


def block_size(value: Any, given: Given) -> Taken:
    """Take the tokens of a block."""
    _only_pretraining("block_size", given)
    return {"block_size": value}


def document_column_name(value: Any, given: Given) -> Taken:
    """Rename a column of documents."""
    _only_pretraining("document_column_name", given)
    _column("document_column_name", value)
    return {} if value == _COLUMN else {"rename_columns": {value: "text"}}


def max_seq_len(value: Any, given: Given) -> Taken:
    """Take the most tokens of a row; a block of documents is never longer than a block."""
    if not given.get("is_pretraining"):
        return {"max_seq_len": value}
    block = given.get("block_size")
    if isinstance(value, int) and isinstance(block, int) and value < block:
        raise SettingsError(
            f"max_seq_len={value} has no effect with is_pretraining: documents are cut into blocks of block_size={block}. Give "
            f"max_seq_len={block} or more, or leave it out."
        )
    return {}


def _column(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise SettingsError(f"{name} must be the name of a column, not {value!r}.")


def _only_pretraining(name: str, given: Given) -> None:
    if not given.get("is_pretraining"):
        raise SettingsError(f"{name} has no effect without is_pretraining=True: set that too, or leave it out.")


def unmask_messages(value: Any, _given: Given) -> Taken:
    """Learn every message."""
    return {"train_on": "all"} if value else {}


def use_processed_dataset(value: Any, _given: Given) -> Taken:
    """Read rows as tokens and labels."""
    return {"data_format": "tokenised"} if value else {}


def process_data(value: Any, _given: Given) -> Taken:
    """Read rows as tokens and labels where they are not to be processed."""
    return {} if value else {"data_format": "tokenised"}


def chat_tmpl_path(value: Any, _given: Given) -> Taken:
    """Take a template's file; a Python module is never run."""
    if str(value).endswith(".py"):
        raise SettingsError(
            f"chat_tmpl_path={value!r} is not available: a Python module is code, and none is run for a template. Write its "
            "CHAT_TEMPLATE to a Jinja file and give chat_template=FILE; its special tokens are add_special_tokens."
        )
    return {"chat_template": value}


_SCHEDULE = {
    "min_lr_ratio": "min_lr_ratio",
    "min_lr_rate": "min_lr_ratio",
    "num_cycles": "num_cycles",
    "num_decay_steps": "decay_steps",
    "decay_steps": "decay_steps",
    "power": "power",
}
_RATES = ("min_lr", "lr_end")
"""Arguments of a schedule that are learning rates, where ours is a share of the highest."""


def lr_scheduler_kwargs(value: Any, given: Given) -> Taken:
    """Take arguments of transformers' schedules that are settings of their own."""
    if not isinstance(value, dict):
        raise SettingsError(f"lr_scheduler_kwargs must be a mapping of names to values, not {value!r}.")
    found: dict[str, Any] = {}
    for name, each in value.items():
        if name in _RATES:
            highest = given.get("learning_rate")
            numbers = all(isinstance(rate, int | float) and rate > 0 for rate in (each, highest))
            # What is no number is refused with the other settings.
            ours, taken = "min_lr_ratio", each / highest if numbers else each
        elif name in _SCHEDULE:
            ours, taken = _SCHEDULE[name], each
        else:
            known = ", ".join(sorted({*_SCHEDULE, *_RATES}))
            raise SettingsError(f"lr_scheduler_kwargs: {name!r} is not available; there are {known}. Leave it out.")
        if found.setdefault(ours, taken) != taken:
            raise SettingsError(f"lr_scheduler_kwargs: {name!r} and another name both say {ours}: give one.")
    return found


def lr_scheduler(value: Any, _given: Given) -> Taken:
    """Take a schedule by transformers' name."""
    return {"lr_scheduler": "constant" if value == "constant_with_warmup" else value}


def adamw_betas(value: Any, _given: Given) -> Taken:
    """Divide the pair."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise SettingsError(f"adamw_betas must be two numbers, not {value!r}.")
    return {"beta1": value[0], "beta2": value[1]}


def disable_flash_attn(value: Any, _given: Given) -> Taken:
    """Take the attention that needs no package of its own."""
    return {"attention": "documents"} if value else {}


def use_liger(value: Any, _given: Given) -> Taken:
    """Take Liger's kernels where they are switched on; off is what `kernels=auto` takes too."""
    return {"kernels": "liger"} if value else {}


def flash_attention(value: Any, _given: Given) -> Taken:
    """Take the attention that needs no package of its own where the fast one is switched off."""
    return {} if value else {"attention": "documents"}


def elsewhere(_value: Any, _given: Given) -> Taken:
    """Leave a value to `lora_adapter` and `lora_batch`, which read several parameters together."""
    return {}


def nnodes(value: Any, _given: Given) -> Taken:
    """Take the number of nodes where there are several."""
    return {} if value == 1 else {"nnodes": value}


def sample_packing(value: Any, _given: Given) -> Taken:
    """Give each sample a row of its own."""
    return {} if value else {"packing": "off"}


def bf16(value: Any, given: Given) -> Taken:
    """Choose the type of the computation, as `bnb_4bit_compute_dtype` does too."""
    kind = "bfloat16" if value is True else "float32" if value is False else value
    if given.get("bnb_4bit_compute_dtype") not in (None, kind):
        raise SettingsError(
            f"bf16={value} and bnb_4bit_compute_dtype={given['bnb_4bit_compute_dtype']!r} differ: a run computes in one dtype, "
            "float32 or bfloat16. Give one of them."
        )
    return {"dtype": kind}


def bnb_4bit_compute_dtype(value: Any, given: Given) -> Taken:
    """Choose the type of the computation."""
    _only_4bit("bnb_4bit_compute_dtype", given)
    return {"dtype": value}


def eight_bits(value: Any, _given: Given) -> Taken:
    """Hold the base in 8 bits."""
    return {"quant_type": "int8"} if value else {}


def four_bits(theirs: str, ours: str) -> Any:
    """Return how a setting of a base in 4 bits is taken."""

    def take(value: Any, given: Given) -> Taken:
        _only_4bit(theirs, given)
        return {ours: value}

    return take


def _only_4bit(name: str, given: Given) -> None:
    if not given.get("load_in_4bit"):
        raise SettingsError(f"{name} has no effect without load_in_4bit=True: set that too, or leave it out.")


def lora_adapter(given: Given) -> str:
    """Return the adapter that the switches of `lora_sft` ask for."""
    kinds = {"load_in_4bit": "qlora", "load_in_8bit": "qlora", "use_dora": "dora", "use_rslora": "rslora"}
    on = [name for name in kinds if given.get(name)]
    if len(on) > 1:
        raise SettingsError(
            f"{' and '.join(on)} are adapters of their own ({', '.join(kinds[name] for name in on)}): give one."
        )
    return kinds[on[0]] if on else "lora"


def lora_batch(given: Given) -> int:
    """Return the samples of a step: those given, or those of a GPU × accumulation × GPUs.

    Raises:
        SettingsError: the number of GPUs is not known, or the numbers contradict each other.

    """
    size = given.get("effective_batch_size")
    parts = [name for name in ("micro_batch_size", "gradient_accumulation_steps") if name in given]
    if size is not None:
        if parts:
            raise SettingsError(
                f"{' and '.join(parts)} has no effect beside effective_batch_size: micro-batches follow from "
                "max_tokens_per_gpu. Leave it out."
            )
        return size
    ranks = [given.get("nproc_per_node", 1), given.get("nnodes", 1)]
    numbers = [given.get("micro_batch_size", 2), given.get("gradient_accumulation_steps", 1), *ranks]
    total = 1
    for number in numbers:
        if not str(number).isdecimal() or int(number) < 1:
            raise SettingsError(
                f"effective_batch_size is required where micro_batch_size, gradient_accumulation_steps, nproc_per_node or "
                f"nnodes is {number!r}, and no number of 1 or more."
            )
        total *= int(number)
    return total


def dataset_type(value: Any, _given: Given) -> Taken:
    """Take a format by its name there."""
    known = {"chat_template": "messages", "alpaca": "alpaca", "input_output": "prompt_completion", "passthrough": "text"}
    return {"data_format": known.get(value, value) if isinstance(value, str) else value}


def renamed(ours: str) -> Any:
    """Return how a column's name is taken."""

    def take(value: Any, _given: Given) -> Taken:
        _column(f"field_{ours}", value)
        return {} if value == ours else {"rename_columns": {value: ours}}

    return take


def eval_steps(value: Any, given: Given) -> Taken:
    """Measure every so many steps."""
    if given.get("eval_data_path") is None:
        raise SettingsError("eval_steps has no effect without eval_data_path: set that too, or leave it out.")
    return {"eval_every_steps": value}


def num_iterations(value: Any, given: Given) -> Taken:
    """Count steps, as the backend art does, or epochs, as verl does."""
    return {"max_steps": value} if given.get("backend") == "art" else {"num_epochs": value}


def use_dr_grpo(value: Any, _given: Given) -> Taken:
    """Choose the loss of arXiv 2503.20783, or that of arXiv 2402.03300."""
    return {"loss_type": "dr_grpo", "scale_rewards": "none"} if value else {"loss_type": "grpo", "scale_rewards": "group"}


def reward_fn(value: Any, _given: Given) -> Taken:
    """Take a reward by its name; a function's arguments differ there and here."""
    if isinstance(value, str) and ":" in value:
        return {"reward": (value,)}
    raise SettingsError(
        f"reward_fn={value!r} is not available: a reward is named, reward_fn='module:function', and is called with lists: "
        "f(prompts, completions, **columns), columns being the other fields of the rows. Leave it out for tool calls."
    )


def max_lora_rank(value: Any, given: Given) -> Taken:
    """Accept a bound of a sampler that is no bound."""
    rank = given.get("lora_r", 16)
    # What is no number is refused as lora_r.
    if isinstance(value, int) and not (isinstance(rank, int) and value < rank):
        return {}
    raise SettingsError(f"max_lora_rank={value} is less than lora_r={given.get('lora_r', 16)}. Leave it out.")


def loss_type(value: Any, _given: Given) -> Taken:
    """Take a loss by its name there."""
    known = {"batch_all_triplet": "batch_all_triplet", "mnrl": "contrastive"}
    if value in known:
        return {"loss": known[value]}
    instead = (
        "batch_all_triplet counts every triplet that is not far enough apart, the hardest among them"
        if value == "batch_hard_triplet"
        else "there are batch_all_triplet and mnrl"
    )
    raise SettingsError(f"loss_type={value!r} is not available: {instead}. Give one of those.")


def batch_sampler(value: Any, given: Given) -> Taken:
    """Take whether equal texts of a batch are negatives; batches are drawn from all rows."""
    pairs = given.get("loss_type") == "mnrl"
    if value == "no_duplicates" and pairs:
        return {"exclude_same_text": True}
    if value == "default":
        return {"exclude_same_text": False} if pairs else {}
    raise SettingsError(
        f"batch_sampler={value!r} is not available{'' if pairs else ' with triplets'}: the texts of a step are drawn from all "
        "rows, the same ones on any number of GPUs. Leave it out; a larger batch_size has more texts of each label."
    )


def labelled_column(ours: str) -> Any:
    """Return how the name of a column of labelled texts is taken."""

    def take(value: Any, given: Given) -> Taken:
        _column(f"{ours}_column", value)
        if value == ours:
            return {}
        if given.get("loss_type") == "mnrl":
            raise SettingsError(
                f"{ours}_column={value!r} has no effect with loss_type=mnrl, whose rows are pairs of `anchor` and `positive`. "
                "training_hub makes one of every two texts of a label. Write those pairs, and give rename_columns."
            )
        return {"rename_columns": {value: ours}}

    return take

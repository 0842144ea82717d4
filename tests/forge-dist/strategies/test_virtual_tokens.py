"""Adapters of virtual tokens: on divided weights they compute what one process does, and their directories are proved like any
other.
"""

import numpy as np
import pytest
import torch

from forge_dist import ExportError, StrategySettings, check_export, export_model, load_model, make_strategy
from forge_dist.exporting._plain import without_added

from ...ranks import run_on_ranks

SAMPLES = [(np.arange(3, 9), np.arange(3, 9)), (np.arange(20, 24), np.arange(20, 24))]
IDS = torch.arange(3, 12)[None]
# Tied, the embedding is gathered with the model's last part; untied, by itself.
CASES = [*(("llama-tied", kind) for kind in ("prefix", "projected", "prompt", "adaption")), ("llama-untied", "prompt")]


def attached(base, kind):
    """`base` with a fresh adapter, by plain PEFT; its text or vocabulary would be looked up, so that
    random numbers begin it.
    """
    import warnings

    from peft import AdaptionPromptConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

    how = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    config = {
        "prefix": lambda: PrefixTuningConfig(**how),
        "projected": lambda: PrefixTuningConfig(**how, prefix_projection=True),
        "prompt": lambda: PromptTuningConfig(**how, prompt_tuning_init="RANDOM"),
        "adaption": lambda: AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=2),
    }[kind]()
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adaption_gate"):
                parameter.fill_(0.5)
    return model


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def on_rank(ranks, paths, folder):
    """(case, logits of the wrapped model, what its proved directory differs by)"""
    found = []
    for architecture, kind in CASES:
        strategy = make_strategy(StrategySettings(strategy="fsdp2"), ranks, device=torch.device("cpu"), adapter=True)
        base = strategy.load(paths[architecture], dtype=torch.float32)
        strategy.settle(base)
        model, _ = strategy.wrap(attached(base, kind), adamw)
        model.eval()
        with torch.no_grad():
            logits = model(IDS, use_cache=False).logits
        export_model(model, f"{folder}/{architecture}-{kind}", strategy=strategy)
        check = check_export(model, f"{folder}/{architecture}-{kind}", SAMPLES, strategy=strategy)
        found.append(((architecture, kind), logits, check.difference))
    return found


@pytest.fixture(scope="module")
def paths(make_model, tmp_path_factory):
    """Directories of tiny models."""
    folder = tmp_path_factory.mktemp("models")
    for architecture in ("llama-tied", "llama-untied"):
        make_model(architecture).save_pretrained(folder / architecture)
    return {architecture: str(folder / architecture) for architecture in ("llama-tied", "llama-untied")}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # by plain PEFT 0.21, as of transformers 5.24
def test_fsdp2(paths, tmp_path):
    """The logits of one process, from an embedding that PEFT asks for before the model; and a directory that gives the same
    loss.
    """
    for reported in run_on_ranks(on_rank, 2, paths, str(tmp_path)):
        for (architecture, kind), logits, difference in reported:
            alone = attached(load_model(paths[architecture], dtype=torch.float32, device=torch.device("cpu")), kind).eval()
            with torch.no_grad():
                torch.testing.assert_close(logits, alone(IDS, use_cache=False).logits, rtol=1e-5, atol=1e-5)
            assert difference < 1e-6


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # by plain PEFT 0.21, as of transformers 5.24
def test_a_projected_prefix_is_written_as_what_it_came_to(paths, tmp_path):
    """The small network is in no directory; a prefix that differs from what it gives is found all the same."""
    model = attached(load_model(paths["llama-tied"], dtype=torch.float32, device=torch.device("cpu")), "projected")
    export_model(model, tmp_path / "adapter")
    assert check_export(model, tmp_path / "adapter", SAMPLES).difference < 1e-6
    with torch.no_grad():
        model.prompt_encoder["default"].transform[2].bias.add_(0.1)
    with pytest.raises(ExportError, match="prompt_embeddings"):
        check_export(model, tmp_path / "adapter", SAMPLES)


@pytest.mark.parametrize("kind", ["prefix", "prompt", "adaption"])
def test_a_module_that_a_run_added(paths, tmp_path, kind):
    """A value head on the model within is known by its name, under whatever name PEFT holds that model; one that is not there
    too.
    """
    model = attached(load_model(paths["llama-tied"], dtype=torch.float32, device=torch.device("cpu")), kind)
    with pytest.raises(ExportError, match="no such module"):
        export_model(model, tmp_path / "adapter", without=("value_head",))
    model.get_base_model().value_head = torch.nn.Linear(16, 1)
    export_model(model, tmp_path / "adapter", without=("value_head",))
    assert check_export(model, tmp_path / "adapter", SAMPLES, without=("value_head",)).difference < 1e-6
    assert not without_added({name: name for name in model.state_dict() if "value_head" in name}, ("value_head",))

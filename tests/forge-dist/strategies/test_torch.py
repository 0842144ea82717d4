"""Gradients, norms, losses and weights of every strategy are those of one process, whatever the number of ranks."""

import pytest

from ...lanes import ci_keeps
from ...ranks import run_on_ranks
from ..training import oracle, reports

pytestmark = pytest.mark.slow

FSDP = {"strategy": "fsdp2"}
HSDP = {"strategy": "hsdp", "shard_size": 2}
ARCHITECTURES = ("llama-tied", "llama-untied", "gemma3")


def scenarios(base, world_size, *, every):
    """Everything that one set of ranks shows; without `every`, of four ranks what two do not show."""
    path, reported = base["llama-tied"], {}
    for architecture in ARCHITECTURES if every or world_size == 2 else ["llama-tied"]:
        reported[f"fsdp2 {architecture}"] = (base[architecture], FSDP, False)
    if every or world_size == 2:
        reported["ddp llama-tied"] = (path, {"strategy": "ddp"}, False)
        reported["ddp lora"] = (path, {"strategy": "ddp"}, True)
        reported["fsdp2 lora"] = (path, FSDP, True)
    if world_size == 2:
        for policy in ("always", "never"):
            reported[f"fsdp2 {policy}"] = (
                path,
                FSDP | {"reshard_after_forward": policy, "activation_checkpointing": True},
                False,
            )
        reported["ddp again"] = (base["gemma3"], {"strategy": "ddp", "activation_checkpointing": True}, False)
        reported["fsdp2 bfloat16"] = (path, FSDP | {"gather_dtype": "bfloat16"}, False)
        reported["fsdp2 lora again"] = (path, FSDP | {"activation_checkpointing": True}, True)
    if world_size == 4:
        reported["hsdp llama-tied"] = (path, HSDP, False)
        reported["hsdp never"] = (path, HSDP | {"reshard_after_forward": "never"}, False)
        reported["hsdp lora"] = (path, HSDP, True)
    return reported


@pytest.fixture(scope="module")
def base(make_model, tmp_path_factory):
    """Directories of the tiny models."""
    folder = tmp_path_factory.mktemp("models")
    for architecture in ARCHITECTURES:
        make_model(architecture).save_pretrained(folder / architecture)
    return {architecture: str(folder / architecture) for architecture in ARCHITECTURES}


@pytest.fixture(scope="module")
def oracles(base):
    """One process, without torch.distributed."""
    return {(path, lora): oracle(path, lora) for path in base.values() for lora in (False, True)}


@pytest.fixture(scope="module", params=ci_keeps(["2", "4 alone"], ["2", "3", "4", "4 alone"]))
def runs(request, base):
    """[(scenario, what each rank reports)]"""
    number, _, alone = request.param.partition(" ")
    world_size = int(number)
    reported = scenarios(base, world_size, every=not alone)
    answers = run_on_ranks(reports, world_size, reported)
    return [(name, reported[name], [answer[name] for answer in answers]) for name in reported]


def exact(runs):
    return [run for run in runs if "bfloat16" not in run[0]]


def test_gradients(runs, oracles):
    """Gradients are the sums over ranks of unequal and idle micro-batches, within 1e-6 of one process, on every rank."""
    for name, (path, _, lora), ranks in exact(runs):
        wanted = oracles[path, lora]["gradients"]
        for report in ranks:
            assert report["gradients"].keys() == wanted.keys(), name
            for key, grad in report["gradients"].items():
                assert (grad - wanted[key]).abs().max() <= 1e-6 * max(1, wanted[key].abs().max()), (name, key)


def test_norms_and_losses(runs, oracles):
    """Norms before and after clipping and losses of three steps are those of one process, the same bits on every rank."""
    for name, (path, _, lora), ranks in exact(runs):
        wanted = oracles[path, lora]
        dtype, shape, norm = ranks[0]["norm"]
        assert (str(dtype), tuple(shape)) == ("torch.float32", ())
        assert norm == pytest.approx(wanted["norm"][2], rel=1e-6), name
        assert all(report["steps"] == ranks[0]["steps"] for report in ranks), name
        for mine, theirs in zip(ranks[0]["steps"], wanted["steps"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5), name
            assert mine[2] == pytest.approx(0.5, rel=1e-5)


def test_weights(runs, oracles):
    """After three steps of AdamW the whole weights lie on rank 0 alone, in the order and under the names of one process."""
    for name, (path, _, lora), ranks in exact(runs):
        wanted = oracles[path, lora]["weights"]
        assert list(ranks[0]["weights"]) == list(wanted), name
        for key, tensor in ranks[0]["weights"].items():
            assert (tensor - wanted[key]).abs().max() <= 2e-5, (name, key)
        for report in ranks[1:]:
            assert list(report["weights"]) == list(wanted)
            assert set(report["weights"].values()) == {None}


def test_names(runs, oracles):
    """A state has the same names in the same order under every strategy; a tied weight comes once, a frozen one not at all."""
    for name, (path, _, lora), ranks in runs:
        assert ranks[0]["state"] == oracles[path, lora]["state"], name
        assert "model/lm_head.weight" not in ranks[0]["state"] or "llama-untied" in name
        assert all("lora" in key for key in ranks[0]["state"]) or not lora


def test_bfloat16(runs, oracles):
    """Weights that are put together as bfloat16 give gradients within what bfloat16 allows, and not float32's."""
    for _, (path, _, lora), ranks in (run for run in runs if "bfloat16" in run[0]):
        ratio = ranks[0]["norm"][2] / oracles[path, lora]["norm"][2]
        assert 1e-6 < abs(ratio - 1) < 0.02

"""A strategy of another package, found by its entry point: loaded, trained, saved, resumed, exported; two of its ranks share a
data shard.
"""

import shutil
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import forge_dist
from forge_dist import Checkpoints, ParallelDims, StrategyError, StrategySettings
from forge_dist._strategy_table import GROUP

from ...ranks import run_on_ranks
from ..divided import SAMPLES, files_of
from ..training import alone, go_on, oracle, report, start, train

NAME = "tensor_parallel"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder as pip leaves it: the other package's module, and the metadata with its entry point."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(Path(__file__).parents[1] / "outside_strategy.py", folder)
    metadata = folder / "outside_strategy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-strategy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{NAME} = outside_strategy:SPEC\n")
    return str(folder)


@pytest.fixture
def installed(site, monkeypatch):
    """The other package is installed in this process."""
    monkeypatch.syspath_prepend(site)
    yield
    sys.modules.pop("outside_strategy", None)


@pytest.fixture(scope="module")
def path(tmp_path_factory, make_model):
    """A tiny model to train."""
    where = tmp_path_factory.mktemp("outside") / "base"
    make_model("llama-tied").save_pretrained(where)
    return str(where)


def scenario(ranks, site, path, directory):
    """All that the strategy is asked to do, in one set of ranks."""
    sys.path.insert(0, site)
    options = {"strategy": NAME}
    found = report(ranks, path, options)
    strategy, model, optimizer = start(ranks, path, options)
    found["data"] = (strategy.data_parallel_size, strategy.data_parallel_rank)
    found["sums"] = strategy.sum([1.0, float(ranks.rank)]), strategy.any(ranks.rank == 1), strategy.any(flag=False)
    shard = strategy.data_parallel_rank
    mine = torch.full((2 - shard, 3), float(shard), requires_grad=True)
    found["gathered"] = [(rows.tolist(), rows.requires_grad, begin) for rows, begin in [strategy.gather(mine)]]
    found["first"] = train(strategy, model, optimizer, (0,))
    strategy, model, where = go_on(found, ranks, path, options, directory, started=(strategy, model, optimizer))
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(forge_dist.ExportError, match="is not the one in memory"):
        forge_dist.check_export(model, where, SAMPLES, strategy=strategy)
    return found


@pytest.mark.slow
def test_it_works_like_a_built_in_one(site, path, tmp_path):
    """On four ranks, two data shards of two ranks each, it trains as one process does, resumes to the bit, and its export is
    proved.
    """
    expected = oracle(path)
    found = run_on_ranks(scenario, 4, site, path, str(tmp_path))
    assert [rank["data"] for rank in found] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    for rank in found:
        assert rank["sums"] == ([2.0, 2.0], True, False)
        assert rank["gathered"] == [([[0.0] * 3] * 2 + [[1.0] * 3], False, 2 * rank["data"][1])]
        assert rank["strategy"] == (NAME, f"strategy={NAME}")
        for name, grad in expected["gradients"].items():
            assert (rank["gradients"][name] - grad).abs().max() <= 1e-6 * max(1, grad.abs().max()), name
        for mine, one in zip(rank["steps"], expected["steps"], strict=True):
            assert mine == pytest.approx(one, rel=1e-5)
        assert rank["steps"] == found[0]["steps"]
        assert rank["state"] == expected["state"]
        assert rank["resumed"] == rank["next"]
        assert rank["check"].difference <= rank["check"].tolerance == 1e-5
    with alone() as ranks:  # and on in one process, from the state of four
        strategy, model, optimizer = start(ranks, path, {"strategy": "single"})
        with Checkpoints(tmp_path / "full_state", ranks, keep=1, background=False) as checkpoints:
            strategy.load_state(model, optimizer, checkpoints.newest({}, print))
        assert train(strategy, model, optimizer, (1,))[0] == pytest.approx(found[0]["next"][0], rel=1e-5)
    assert {"config.json", "model.safetensors"} <= files_of(tmp_path / "exported").keys()


class Three:
    """Three ranks, none of which is there."""

    rank, world_size, local_world_size, is_first = 0, 3, 3, True


def test_its_name_and_its_options_are_those_of_its_row(installed):
    """Settings take its name and the options that its row lists, and refuse the others; the class refuses what the row cannot
    say.
    """
    settings = StrategySettings(strategy=NAME, shard_size=2)
    with pytest.raises(ValueError, match="cpu_offload=True has no effect with strategy=tensor_parallel"):
        StrategySettings(strategy=NAME, cpu_offload=True)
    with pytest.raises(ValueError, match=r"strategy must be one of auto, single, .*, zero3, tensor_parallel; got 'tp'"):
        StrategySettings(strategy="tp")
    with pytest.raises(StrategyError, match="takes pairs of ranks, and there are 3"):
        forge_dist.make_strategy(settings, Three(), device=torch.device("cpu"), adapter=False)
    with pytest.raises(StrategyError, match="optimizer=adafactor"):
        forge_dist.make_strategy(settings, Three(), device=torch.device("cpu"), adapter=False, optimizer="adafactor")


def test_without_it_the_name_is_unknown():
    """Where it is not installed, the known names are listed."""
    with pytest.raises(ValueError, match=r"strategy must be one of auto, .*, zero3; got 'tensor_parallel'"):
        StrategySettings(strategy=NAME)


@pytest.fixture
def declared(monkeypatch):
    """`declared(name="module:attribute")`: the entry points of installed packages."""

    def declare(**values):
        found = [EntryPoint(name, value, GROUP) for name, value in values.items()]
        monkeypatch.setattr("forge_dist._strategy_table.entry_points", lambda group: found if group == GROUP else [])

    return declare


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:SPEC", "could not be loaded: No module named 'no_such_module'"),
        ("forge_dist:no_such_name", "could not be loaded"),
        ("forge_dist:Strategy", r"is no forge_dist\.StrategySpec"),
    ],
)
def test_an_entry_point_that_leads_nowhere(declared, value, message):
    """The message names the setting and the entry point's value."""
    declared(odd=value)
    with pytest.raises(ValueError, match=f"strategy='odd': {value} {message}"):
        StrategySettings(strategy="odd")


def test_a_class_that_is_not_there(declared, monkeypatch):
    """A row whose class cannot be imported, or needs a package that is not installed, says so when it is chosen."""
    rows = {
        "broken": forge_dist.StrategySpec(strategy="forge_dist:Nothing", about="-"),
        "needy": forge_dist.StrategySpec(strategy="forge_dist:Nothing", about="-", requires=("no_such",), install="no-such>=2"),
    }
    for name, row in rows.items():
        monkeypatch.setattr(forge_dist, f"_{name}", row, raising=False)
    declared(**{name: f"forge_dist:_{name}" for name in rows})
    for name, message in {
        "broken": "strategy=broken: forge_dist:Nothing could not be loaded",
        "needy": r"strategy=needy needs no_such: `pip install 'no-such>=2'`",
    }.items():
        with pytest.raises(StrategyError, match=message):
            forge_dist.make_strategy(StrategySettings(strategy=name), Three(), device=torch.device("cpu"), adapter=False)


def test_a_built_in_name_cannot_be_taken(declared):
    """A package that is merely installed does not replace a strategy, and is warned of."""
    declared(ddp="forge_dist:Strategy")
    with pytest.warns(RuntimeWarning, match="the entry point ddp = forge_dist:Strategy is ignored: that name is taken"):
        pytest.raises(ValueError, StrategySettings, strategy="unknown")
    assert StrategySettings(strategy="ddp").strategy == "ddp"


@pytest.mark.parametrize(("replicate", "shard", "share"), [(1, 1, 1), (2, 3, 1), (2, 1, 2), (1, 2, 3)])
def test_every_data_shard_counts_once(replicate, shard, share):
    """Ranks are dealt to data shards in runs of equal length, and one of each counts."""
    dims = ParallelDims(dp_replicate=replicate, dp_shard=shard, non_data=share)
    shards = [dims.data_parallel_rank(rank) for rank in range(dims.world_size)]
    assert shards == sorted(shards)
    assert [shards.count(number) for number in range(dims.data_parallel_size)] == [share] * (replicate * shard)
    assert [shards[rank] for rank in range(dims.world_size) if dims.counts(rank)] == list(range(dims.data_parallel_size))


@pytest.mark.parametrize(
    ("world_size", "settings", "expected"),
    [
        (1, {"strategy": "single"}, ParallelDims()),
        (4, {"strategy": "ddp"}, ParallelDims(dp_replicate=4)),
        (4, {"strategy": "fsdp2"}, ParallelDims(dp_shard=4)),
        (4, {"strategy": "hsdp", "shard_size": 2}, ParallelDims(dp_replicate=2, dp_shard=2)),
    ],
)
def test_each_rank_of_a_built_in_strategy_has_its_own_data(world_size, settings, expected):
    """Copies and shards alike are data-parallel; the last rank has the last data shard."""

    class Last:
        rank, is_first, local_world_size = world_size - 1, world_size == 1, world_size

    Last.world_size = world_size
    strategy = forge_dist.make_strategy(StrategySettings(**settings), Last(), device=torch.device("cpu"), adapter=False)
    assert strategy.dims == expected
    assert strategy.data_parallel_size == world_size
    assert strategy.data_parallel_rank == world_size - 1

"""A few steps of training under a strategy, as a caller of the protocol would write them; functions that run on ranks."""

from contextlib import nullcontext

ROWS = 7  # rows of one step, of 5, 6, 7, ... tokens: no number of ranks divides their tokens evenly


class Absent:
    """The first of some ranks that are not there, for what is decided before any is asked."""

    def __init__(self, world_size):
        self.world_size, self.local_world_size, self.rank, self.is_first = world_size, world_size, 0, True


def alone():
    """The ranks of a world of one."""
    import forge_dist

    return forge_dist.join(forge_dist.topology(forge_dist.LaunchSettings(), environ={}))


def row(step, number):
    import torch

    return torch.randint(0, 61, (1, 5 + number), generator=torch.Generator().manual_seed(100 * step + number))


def nll(model, ids):
    """Summed over the row."""
    import torch

    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="sum")


def shares(world_size):
    """rank → column → the row of its micro-batch, or None; the last of several ranks has work in the first column alone."""
    dealt = [[] for _ in range(world_size)]
    for number in range(ROWS):
        rank = number % world_size
        if rank == world_size - 1 > 0 and dealt[rank]:
            rank = 0
        dealt[rank].append(number)
    columns = max(map(len, dealt))
    return [rows + [None] * (columns - len(rows)) for rows in dealt]


def start(ranks, path, options, *, lora=False, dtype=None):
    """(strategy, wrapped model, optimizer)"""
    import torch

    import forge_dist

    settings = forge_dist.StrategySettings(**options)
    strategy = forge_dist.make_strategy(settings, ranks, device=torch.device("cpu"), adapter=lora)
    model = strategy.load(path, dtype=torch.float32 if dtype is None else dtype)
    if lora:
        from peft import LoraConfig, get_peft_model

        # Each rank draws other adapters: they must become rank 0's.
        torch.manual_seed(ranks.rank)
        strategy.settle(model)
        model = get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2, init_lora_weights=False)
        )
    model, optimizer = strategy.wrap(model, adamw)
    model.train()
    return strategy, model, optimizer


def adamw(model):
    import torch

    # With eps=1e-8 Adam would amplify the last bits of small gradients, which differ between processors and divisions.
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1, eps=1e-3)


def backward(strategy, model, step=0):
    """One step's gradients and its global loss; a rank with nothing to learn in a column takes part with a loss of 0."""
    count = sum(4 + number for number in range(ROWS))
    total = 0.0
    mine = shares(strategy.data_parallel_size)[strategy.data_parallel_rank]
    for column, number in enumerate(mine):
        with strategy.micro_batch(column == len(mine) - 1):
            loss = nll(model, row(0, 0)) * 0.0 if number is None else nll(model, row(step, number))
            strategy.backward(loss / count)
        total += loss.item()
    return strategy.sum([total])[0] / count


def train(strategy, model, optimizer, steps=(0, 1, 2), clip=True):
    """[(loss, norm before clipping, norm after it)]"""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    done = []
    for step in steps:
        strategy.zero_grad(optimizer)
        loss = backward(strategy, model, step)
        norm = strategy.grad_norm(parameters)
        if clip:
            strategy.scale_grads(parameters, 0.5 / norm.item())
        done.append((loss, norm.item(), strategy.grad_norm(parameters).item()))
        strategy.step(optimizer)
    return done


def gradients(model):
    """Whole gradients by name, as one process would have them."""
    from torch.distributed.tensor import DTensor

    from forge_dist.strategies._wrappers import resharded

    found = {}
    for name, parameter in resharded(model).named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
    return found


def report(ranks, path, options, lora=False):
    """All that a scenario shows: gradients of one step, then losses, norms and weights of three."""
    strategy, model, optimizer = start(ranks, path, options, lora=lora)
    strategy.zero_grad(optimizer)
    backward(strategy, model)
    grads = gradients(model)
    norm = strategy.grad_norm([p for group in optimizer.param_groups for p in group["params"]])
    done = train(strategy, model, optimizer)
    weights = dict(strategy.whole(model))
    names = list(strategy.state(model, optimizer))
    return {
        "strategy": (strategy.name, strategy.reason),
        "gradients": grads,
        "norm": (norm.dtype, norm.shape, norm.item()),
        "steps": done,
        "weights": {name: tensor.clone() for name, tensor in weights.items()} if ranks.is_first else weights,
        "state": names,
    }


def reports(ranks, scenarios):
    """Several scenarios in one set of ranks: {name: (path, options, lora)} → {name: report}"""
    return {name: report(ranks, *scenario) for name, scenario in scenarios.items()}


def oracle(path, lora=False):
    """The same in one process."""
    import torch

    with alone() as ranks, torch.random.fork_rng() if lora else nullcontext():
        return report(ranks, path, {"strategy": "single"}, lora)


class Kept(dict):
    """A checkpoint in memory: whole tensors by name, read into tensors and DTensors."""

    @classmethod
    def of(cls, state):
        from torch.distributed.tensor import DTensor

        return cls({n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in state.items()})

    @property
    def tensors(self):
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.items()}

    def read(self, into):
        from torch.distributed.tensor import DTensor, distribute_tensor

        for name, tensor in into.items():
            whole = self[name]
            if isinstance(tensor, DTensor):
                tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None))
            else:
                tensor.copy_(whole)


def go_on(found, ranks, path, options, directory, *, started):
    """Save after a step, make the next, make it again from the state, export and prove the export: (strategy, model, export).

    `found` gets the `next` and the `resumed` step, and the `check` of the export.
    """
    from pathlib import Path

    import forge_dist

    from .divided import SAMPLES

    strategy, model, optimizer = started
    states = Path(directory, "full_state")
    with forge_dist.Checkpoints(states, ranks, keep=1, background=False) as checkpoints:
        checkpoints.save(1, strategy.state(model, optimizer), {})
        state = checkpoints.last_good
    found["next"] = train(strategy, model, optimizer, (1,))
    strategy, model, optimizer = start(ranks, path, options)
    with forge_dist.Checkpoints(states, ranks, keep=1, background=False) as checkpoints:
        strategy.load_state(model, optimizer, checkpoints.at(state, {}))
    found["resumed"] = train(strategy, model, optimizer, (1,))
    where = forge_dist.export_model(model, Path(directory, "exported"), strategy=strategy)
    found["check"] = forge_dist.check_export(model, where, SAMPLES, strategy=strategy)
    return strategy, model, where

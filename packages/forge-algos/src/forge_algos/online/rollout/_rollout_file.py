"""JSONL file of a rollout that a person can read: a line about the whole, then completions.

A float32 is written with nine significant digits, which name it and no other. The first line ends with the SHA-256 of all that
the file says, so that what a run goes on from is what it wrote.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_algos._errors import RolloutError

VERSION = 1
_SEAL = "sha256"
_OF_TOKENS = ("old_logps", "ref_logps", "values", "advantages", "returns", "sampler_logps", "entropy")


def write(fields: Mapping[str, Any], path: Path) -> None:
    """Write under a temporary name beside the file, then rename it, so that it is always whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            head, *lines = _lines(fields)
            written = [_bytes(line) for line in lines]
            file.write(_bytes({**head, _SEAL: _digest(head, written)}))
            file.writelines(written)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _bytes(line: Mapping[str, Any]) -> bytes:
    # A lone surrogate in a text is written as JSON's escape.
    return json.dumps(line, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"


def _digest(head: Mapping[str, Any], lines: list[bytes]) -> str:
    digest = hashlib.sha256(_bytes(head))
    for line in lines:
        digest.update(line)
    return digest.hexdigest()


def _lines(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    arrays = [name for name in _OF_TOKENS if fields[name] is not None]
    yield {
        "rollout": VERSION,
        "seed": fields["seed"],
        "resampled": fields["resampled"],
        **({} if fields["equal_rewards"] is None else {"equal_rewards": fields["equal_rewards"]}),
        **({} if fields["entropy"] is None else {"least_entropy": fields["least_entropy"]}),
        "prompts": len(fields["prompt_rows"]),
        "completions": len(fields["groups"]),
        "functions": list(fields["scores"]),
        "arrays": arrays,
    }
    learned = fields["learned"]
    drawn = fields["completion_ids"] if learned is None else [mask.nonzero()[0] for mask in learned]
    starts = np.append(0, np.cumsum([len(each) for each in drawn], dtype=np.int64))
    seen = -1
    for i, group in enumerate(fields["groups"].tolist()):
        line: dict[str, Any] = {"group": group}
        if group != seen:
            seen = group
            line |= {
                "row": int(fields["prompt_rows"][group]),
                "prompt": fields["prompt_texts"][group],
                "prompt_ids": fields["prompt_ids"][group].tolist(),
            }
            greedy = fields["greedy_rewards"]
            line |= {} if greedy is None else {"greedy_reward": _plain(greedy[group : group + 1])[0]}
        tokens = slice(starts[i], starts[i + 1])
        yield line | {
            "completion": fields["completion_texts"][i],
            "reward": _plain(fields["rewards"][i : i + 1])[0],
            "scores": {name: _plain(values[i : i + 1])[0] for name, values in fields["scores"].items()},
            "finished": bool(fields["finished"][i]),
            "trained": bool(fields["trained"][i]),
            "masked": bool(fields["masked"][i]),
            "completion_ids": fields["completion_ids"][i].tolist(),
            **({} if learned is None else {"learned": learned[i].astype(int).tolist()}),
            **{name: _plain(fields[name][tokens]) for name in arrays},
        }


def read(path: Path) -> dict[str, Any]:
    """Read the fields of a `Rollout`.

    Raises:
        RolloutError: the file is missing, is no rollout, or is not what was written.
    """
    try:
        with path.open("rb") as file:
            head = json.loads(file.readline())
            if not isinstance(head, dict) or head.get("rollout") != VERSION:
                raise RolloutError(f"{path} holds no rollout of version {VERSION}: its first line is {str(head)[:80]}")
            lines = list(file)
        if len(lines) != head["completions"]:
            raise RolloutError(f"{path} is not whole: it has {len(lines)} of {head['completions']} completions")
        # Files of earlier versions have none.
        if (seal := head.pop(_SEAL, None)) is not None and seal != _digest(head, lines):
            raise RolloutError(f"{path} does not have the SHA-256 that it says it has: it was edited or damaged")
        return _fields(head, [json.loads(line) for line in lines])
    except OSError as error:
        raise RolloutError(f"{path} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, RolloutError):
            raise
        raise RolloutError(f"{path} holds no rollout, or a damaged one: {type(error).__name__}: {error}") from error


def _fields(head: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    prompts = [line for line in lines if "prompt_ids" in line]
    if len(prompts) != head["prompts"]:
        raise ValueError(f"{len(prompts)} of {head['prompts']} prompts")
    found: dict[str, Any] = {
        "seed": int(head["seed"]),
        # Absent in files of earlier versions, as `masked`.
        "resampled": int(head.get("resampled", 0)),
        "equal_rewards": head.get("equal_rewards"),
        "least_entropy": float(head.get("least_entropy", 0.0)),
        "prompt_rows": np.array([line["row"] for line in prompts], np.int64),
        "prompt_ids": tuple(np.array(line["prompt_ids"], np.int32) for line in prompts),
        "prompt_texts": tuple(line["prompt"] for line in prompts),
        "greedy_rewards": _floats([line["greedy_reward"] for line in prompts])
        if prompts and "greedy_reward" in prompts[0]
        else None,
        "groups": np.array([line["group"] for line in lines], np.int64),
        "completion_ids": tuple(np.array(line["completion_ids"], np.int32) for line in lines),
        "completion_texts": tuple(line["completion"] for line in lines),
        "finished": np.array([line["finished"] for line in lines], bool),
        "trained": np.array([line["trained"] for line in lines], bool),
        "masked": np.array([line.get("masked", False) for line in lines], bool),
        "rewards": _floats([line["reward"] for line in lines]),
        "scores": {name: _floats([line["scores"][name] for line in lines]) for name in head["functions"]},
    }
    found["learned"] = tuple(np.array(line["learned"], bool) for line in lines) if lines and "learned" in lines[0] else None
    tokens = sum(map(len, found["completion_ids"])) if found["learned"] is None else sum(m.sum() for m in found["learned"])
    for name in _OF_TOKENS:
        values = _floats([value for line in lines for value in line[name]]) if name in head["arrays"] else None
        if values is not None and len(values) != tokens:
            raise ValueError(f"{len(values)} {name} for {tokens} tokens")
        found[name] = values
    return found


def _plain(values: NDArray[np.float32]) -> list[float | None]:
    return [None if value != value else float(f"{value:.9g}") for value in values.tolist()]  # noqa: PLR0124  NaN


def _floats(values: list[float | None]) -> NDArray[np.float32]:
    return np.array([np.nan if value is None else value for value in values], np.float32)

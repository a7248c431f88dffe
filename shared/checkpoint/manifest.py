"""The manifest of a checkpoint: the run it belongs to, and a digest of every array in it."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from shared.config import Config, InputError, ModelConfig, OptimizerConfig
from shared.placement.strategies import ALIASES
from shared.runtime.keys import KEY_TYPE

FORMAT = 1
"""Version of this layout of checkpoints; others are refused."""

FREE_FIELDS = ("strategy", "mesh", "microbatches", "model.remat", "model.unroll", "bucket_bytes")
"""Fields of a configuration that change how a step is computed, not its result; a run may resume with others."""

FORMER_NAMES = {"width": "d_model", "hidden": "d_ff", "window": "seq_len"}
"""Fields of the model as checkpoints saved before 2026-12 name them."""


@dataclass(frozen=True)
class StoredArray:
    """One array of the state."""

    shape: tuple[int, ...]
    dtype: str
    digest: str
    """See shared/checkpoint/digest.py."""


@dataclass(frozen=True)
class Manifest:
    """Stored beside the arrays of each step, as JSON, with a hash over itself."""

    step: int
    """Steps done; also the data's position, since batches are a function of (seed, step) (shared/data/batches.py)."""
    config: Config
    text: str
    """sha256 of the training text, and how many bytes it has."""
    program: str
    """The twin that saved it, and its mesh."""
    leaves: Mapping[str, StoredArray]
    key_type: str = KEY_TYPE
    """Type of the random key (`jax.random.key_impl`)."""

    @property
    def text_size(self) -> int:
        """Bytes of the training text."""
        return int(self.text.split()[1])

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data that `from_json` reads."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        return {**content, "sha256": content_hash(content)}

    @staticmethod
    def from_json(data: Any) -> "Manifest":
        """Read the data that `to_json` made. Raises ValueError if it was changed or has a different format."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise InputError(f"its manifest is not one of format {FORMAT}")
        content = {name: value for name, value in data.items() if name != "sha256"}
        if data.get("sha256") != content_hash(content):
            raise InputError("its manifest does not match its own hash")
        config = dict(content["config"])
        config["strategy"] = ALIASES.get(config["strategy"], config["strategy"])
        model = {FORMER_NAMES.get(name, name): value for name, value in config.pop("model").items()}
        optimizer = OptimizerConfig(**config.pop("optimizer"))
        return Manifest(
            step=content["step"],
            config=Config(ModelConfig(**model), optimizer, **config),
            text=content["text"],
            program=content["program"],
            key_type=content.get("key_type", KEY_TYPE),  # checkpoints saved before 2026-12 do not have it
            leaves={
                name: StoredArray(tuple(leaf["shape"]), leaf["dtype"], leaf["digest"])
                for name, leaf in content["leaves"].items()
            },
        )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of one step's folder. Raises ValueError if it is missing or damaged.

    Orbax keeps JSON in a file called metadata; reading it here needs neither Orbax nor a started JAX.
    """
    file = folder / "manifest" / "metadata"
    try:
        return Manifest.from_json(json.loads(file.read_text()))
    except OSError as error:
        raise InputError(f"its manifest cannot be read ({error.strerror})") from None
    except InputError:
        raise
    except (ValueError, KeyError, TypeError):
        raise InputError("its manifest is damaged") from None


def content_hash(content: Mapping[str, Any]) -> str:
    """sha256 of the data as JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def text_hash(text: np.ndarray) -> str:
    """Return sha256 and size of a training text, bytes as (N,) uint8, as manifests have them."""
    return f"{hashlib.sha256(text.tobytes()).hexdigest()}, {text.size} bytes"


def saved_steps(directory: Path) -> list[int]:
    """Return the steps that have a folder in the directory, newest first; none if there is no directory."""
    if not directory.is_dir():
        return []
    names = (path.name for path in directory.iterdir() if path.is_dir())
    return sorted((int(name) for name in names if name.isdecimal() and name == str(int(name))), reverse=True)


def misfits(manifest: Manifest, config: Config, text: str) -> list[str]:
    """Return the fields that differ between a checkpoint and a run that would resume from it, with both values."""
    saved, requested = flat(manifest.config), flat(config)
    free = set(FREE_FIELDS)
    if config.optimizer.schedule == "constant":
        free.add("steps")  # the learning rate does not depend on it
    found = [
        f"{name} (saved {saved[name]}, requested {requested[name]})"
        for name in saved
        if name not in free and saved[name] != requested[name]
    ]
    if manifest.text != text:
        found.append(f"training text (saved {short(manifest.text)}, requested {short(text)})")
    return found


def flat(config: Config) -> dict[str, Any]:
    """A configuration's fields by name, those of its parts as model.layers."""
    return flatten_dict(dataclasses.asdict(config), sep=".")


def short(text: str) -> str:
    """A described text with only the beginning of its hash."""
    digest, size = text.split(", ")
    return f"{digest[:8]}…, {size}"

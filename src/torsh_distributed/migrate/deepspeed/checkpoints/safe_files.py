"""Files of torch.save from another library, read without running anything of theirs.

torch's `weights_only` reading builds plain values and tensors alone. The few classes of DeepSpeed that its files name
are on a list here, and each is read as an inert record: nothing of DeepSpeed is imported, and any other name in a file
is an error. Never bare pickle.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from torsh_distributed.errors import CheckpointError
from torsh_distributed.unreadable_data import reason_of


class InertRecord:
    """What an object of another library held: its attributes, and no behaviour. Made by reading a file."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of the object."""
        return self.__dict__.get(name, default)


KNOWN_NAMES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "argparse.Namespace",
    "types.SimpleNamespace",
)
"""Classes that DeepSpeed's files name, and those in which training scripts keep their arguments."""
_STAGES = "deepspeed.runtime.zero.config.ZeroStageEnum"


def load_safely(path: Path, *, inert: Iterable[str] = ()) -> Any:
    """The value in a file that torch.save wrote, with tensors mapped, not read.

    `inert`: further classes by full name that the file may name; they become records too. Raises CheckpointError for a
    file that is missing, damaged, or names anything else.
    """
    # Two names of one class may not share an object: torch finds the name of an allowed object by its identity.
    records = [(type("InertRecord", (InertRecord,), {}), name) for name in (*KNOWN_NAMES, *inert)]
    allowed: list[Any] = [*records, (int, _STAGES)]
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{path} is not a file")
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}", hint="copy the whole directory of the checkpoint") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path.name} names what a checkpoint does not hold, and is not read: {_names(path, error)}",
            hint="if you trust the file and these are plain records of your script, name them: inert=(…), --inert NAME",
            path=str(path),
        ) from error
    except Exception as error:  # a forged pickle may fail in any of torch's lines
        raise CheckpointError(
            f"{path.name} is damaged, or no file of torch.save: {reason_of(error)}",
            hint="copy the file again from where it was stored",
            path=str(path),
        ) from error


def _names(path: Path, error: Exception) -> str:
    """What the file asks for beyond the list, as far as that can be found out without running it."""
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # as above: then torch's own words have to do
        unsafe = []
    others = [name for name in unsafe if name not in (*KNOWN_NAMES, _STAGES)]
    return ", ".join(others) if others else str(error).splitlines()[0]

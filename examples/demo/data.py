"""Text that every machine has: the Python standard library's own source files, as bytes.

Files are split into training and validation by a hash of their path, so that a file stays on its side
whatever else is installed. The batch of a step depends on the seed and the step only: two optimizers see
the same bytes in the same order, and however many processes share the batch, its rows are the same.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Third-party code differs between machines, tests are not installed everywhere: leave both out.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
FILE_SEPARATOR = b"\x00"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and validation bytes (1-D uint8) and the files that they came from, by relative path."""

    train: Tensor
    valid: Tensor
    train_files: tuple[str, ...]
    valid_files: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Short hash of all bytes: equal digests mean equal data."""
        state = hashlib.blake2b(digest_size=8)
        for part in (self.train, self.valid):
            state.update(str(part.numel()).encode())
            state.update(part.numpy().tobytes())
        return state.hexdigest()


def default_source_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_validation(relative_path: str, fraction: float) -> bool:
    """Whether a file belongs to the validation side; depends on its path and `fraction` only."""
    digest = hashlib.blake2b(relative_path.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def source_files(root: Path) -> list[str]:
    """Relative POSIX paths of the Python files below `root`, sorted, without tests and third-party code."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path.as_posix() for path in paths if not SKIPPED_FOLDERS.intersection(path.parts))


def load_corpus(root: Path, valid_fraction: float) -> Corpus:
    """Read every source file below `root` into one side or the other.

    Raises:
        ValueError: `root` holds no Python files, or one side came out empty.
    """
    files = source_files(root)
    if not files:
        raise ValueError(f"no .py files below {root}: name a folder of source text with --data")
    valid_files = tuple(name for name in files if is_validation(name, valid_fraction))
    train_files = tuple(name for name in files if not is_validation(name, valid_fraction))
    if not valid_files or not train_files:
        side = "validation" if not valid_files else "training"
        raise ValueError(
            f"{len(files)} files below {root} and none of them fell on the {side} side: "
            "change --valid-fraction or give more files"
        )
    return Corpus(read_files(root, train_files), read_files(root, valid_files), train_files, valid_files)


def read_files(root: Path, names: tuple[str, ...]) -> Tensor:
    """The bytes of these files, one after the other."""
    text = FILE_SEPARATOR.join((root / name).read_bytes() for name in names)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class TrainBatches:
    """Batches of windows of `seq_len + 1` bytes, each window seen once per pass over the data.

    A pass cuts the bytes into windows at a start of its own and shuffles them. Any step's batch can be asked
    for directly, so nothing needs to be replayed after a restart.
    """

    def __init__(self, data: Tensor, seq_len: int, batch_size: int, seed: int) -> None:
        # One window less than fit, so that every pass may start up to one window late.
        self.windows = (data.numel() - 1) // seq_len - 1
        if self.windows < 1:
            raise ValueError(
                f"{data.numel()} bytes of training text are too few for windows of {seq_len}: lower --seq-len or give "
                "more text"
            )
        self.data, self.seq_len, self.batch_size, self.seed = data, seq_len, batch_size, seed
        self._pass_cache: tuple[int, Tensor] | None = None

    def starts(self, step: int) -> list[int]:
        """First byte of each of the global batch's windows at `step` (from 0)."""
        first = step * self.batch_size
        return [self._start(index) for index in range(first, first + self.batch_size)]

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 (rows, seq_len): this rank's consecutive rows of the global batch."""
        if self.batch_size % world_size:
            raise ValueError(f"a global batch of {self.batch_size} does not divide over {world_size} processes")
        rows = self.batch_size // world_size
        return _windows(self.data, self.starts(step)[rank * rows : (rank + 1) * rows], self.seq_len)

    def _start(self, index: int) -> int:
        pass_number, position = divmod(index, self.windows)
        if self._pass_cache is None or self._pass_cache[0] != pass_number:
            self._pass_cache = (pass_number, self._shuffled_starts(pass_number))
        return int(self._pass_cache[1][position])

    def _shuffled_starts(self, pass_number: int) -> Tensor:
        key = hashlib.blake2b(f"{self.seed}/{pass_number}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
        shift = torch.randint(self.seq_len, (1,), generator=generator)
        return torch.randperm(self.windows, generator=generator) * self.seq_len + shift


def valid_batches(data: Tensor, seq_len: int, batch_size: int, windows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same `windows` windows, spread evenly over the validation bytes, at every call."""
    last_start = data.numel() - seq_len - 1
    if last_start < 0:
        raise ValueError(
            f"{data.numel()} bytes of validation text do not fill one window of {seq_len}: "
            "lower --seq-len or raise --valid-fraction"
        )
    starts = [last_start * i // max(1, windows - 1) for i in range(windows)]
    for i in range(0, windows, batch_size):
        yield _windows(data, starts[i : i + batch_size], seq_len)


def _windows(data: Tensor, starts: list[int], seq_len: int) -> tuple[Tensor, Tensor]:
    rows = torch.stack([data[start : start + seq_len + 1] for start in starts]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

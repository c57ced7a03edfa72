"""A Llama's weights from safetensors files into sharded ranks: speed against the disk's, memory against the shard's."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed import needs

GB = 10**9
NUM_RANKS = 2
_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama in bf16."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


FULL_GB = 8
_LAYER_GB, _TABLES_GB = 0.405, 0.524  # of the sizes below


def full_size() -> Size:
    """A model of about TORSH_BENCH_GB: the layers of Llama 7B, as many as fit."""
    wanted = float(os.environ.get("TORSH_BENCH_GB", FULL_GB))
    return Size(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=max(1, round((wanted - _TABLES_GB) / _LAYER_GB)),
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
    )


QUICK_SIZE = Size(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
)


def _write_checkpoint(folder: Path, size: Size) -> int:
    """Files as Hugging Face writes them, of about 2 GB each, with random values; returns the bytes of all tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from torsh_distributed.train.inference.export import TensorFiles

    config = LlamaConfig(**asdict(size), tie_word_embeddings=False, dtype="bfloat16")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    partial = folder / "partial"
    partial.mkdir()
    files = TensorFiles(partial, list(model.state_dict()), max_bytes=2 * GB)
    drawn = torch.randn(2**22, dtype=torch.bfloat16)  # repeated: it is their bytes that count
    for name, value in model.state_dict().items():
        times = -(-value.numel() // drawn.numel())
        files.write(name, drawn.repeat(times)[: value.numel()].view(value.shape))
    files.finish(folder)
    partial.rmdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return files.total_bytes


def _drop_cache(folder: Path) -> None:
    """Take the files out of the page cache, so they are read from the disk."""
    os.sync()
    for file in folder.glob("*.safetensors"):
        opened = os.open(file, os.O_RDONLY)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


def _disk_s(folder: Path) -> float:
    """Seconds to read all bytes once, by as many processes as there are ranks: what `dd` measures."""
    files = sorted(folder.glob("*.safetensors"))
    program = (
        "import os, sys\n"
        "buffer = bytearray(int(sys.argv[1]))\n"
        "for number, file in enumerate(sys.argv[4:]):\n"
        "    opened, size = os.open(file, os.O_RDONLY), os.stat(file).st_size\n"
        "    for place in range(int(sys.argv[2]) * size // int(sys.argv[3]),"
        " (int(sys.argv[2]) + 1) * size // int(sys.argv[3]), len(buffer)):\n"
        "        os.preadv(opened, [buffer], place)\n"
    )
    _touch_memory()
    started = time.perf_counter()
    readers = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", program, str(_CHUNK_BYTES), str(rank), str(NUM_RANKS), *map(str, files)]
        )
        for rank in range(NUM_RANKS)
    ]
    if any(reader.wait() for reader in readers):
        raise RuntimeError("a reader failed")
    return time.perf_counter() - started


_TOUCH = """
import mmap, os
free = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
mmap.mmap(-1, int(0.8 * free), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).madvise(23)  # MADV_POPULATE_WRITE
"""
"""Touches memory that is free. A virtual machine gets it from its host when it is first used, page by page, and whoever
comes first would pay for it."""


def _touch_memory() -> None:
    subprocess.run([sys.executable, "-S", "-c", _TOUCH], check=True)


_OURS = """
import json, resource, sys, time
from benchmarks.cases.loading import _touch_memory
import torch
from functools import partial
from transformers import AutoConfig, AutoModelForCausalLM
import torsh_distributed as td
from torsh_distributed import parallelize  # all of it is imported before the clock starts
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel

td.init()
config = AutoConfig.from_pretrained(sys.argv[1])
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
plan = td.Plan(mesh={"dp": 1, "shard": -1})
if td.rank() == 0:
    _touch_memory()
td.barrier()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.perf_counter()
engine = parallelize(model, partial(torch.optim.SGD, lr=0.1), plan, weights=sys.argv[1])
td.barrier()
seconds = time.perf_counter() - started
for param in model.parameters():  # written, and not yet part of this process: touched, as the first step would
    param.to_local().sum()
extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
values = td.all_gather_object(extra)
if td.rank() == 0:
    print("RESULT" + json.dumps({"seconds": seconds, "extra_bytes": max(values)}))
"""

_THEIRS = """
import json, resource, sys, time
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from benchmarks.cases.loading import _touch_memory
_touch_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
# Its tensors may be mapped from the files: touch them, as the first step would.
for param in model.parameters():
    param.data = param.data.clone()
seconds = time.perf_counter() - started
extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print("RESULT" + json.dumps({"seconds": seconds, "extra_bytes": extra}))
"""


def _run(program: str, folder: Path, command: list[str]) -> dict[str, float]:
    script = folder.parent / "program.py"
    script.write_text(program)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([*command, str(script), str(folder)], capture_output=True, text=True, env=env)
    line = next((one for one in done.stdout.splitlines() if "RESULT" in one), None)
    if done.returncode or line is None:
        raise RuntimeError(f"loading failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(line.partition("RESULT")[2])
    return found


def _rows(budget: Budget) -> Iterator[Row | Note]:
    lacking = needs.library("transformers")
    if lacking is not None:
        yield Note(text=f"not measured: {lacking}")
        return
    size = QUICK_SIZE if budget.is_quick else full_size()
    num_samples = 1 if budget.is_quick else 3
    launch = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--nproc-per-node", str(NUM_RANKS)]
    with tempfile.TemporaryDirectory(dir=os.environ.get("TORSH_BENCH_DIR")) as place:
        folder = Path(place) / "llama"
        folder.mkdir()
        free = shutil.disk_usage(folder).free
        needed = 0 if budget.is_quick else 1.5 * GB * (size.num_hidden_layers * _LAYER_GB + _TABLES_GB)
        if free < needed:
            yield Note(
                text=f"not measured: the checkpoint needs {needed / GB:.0f} GB of disk, {free / GB:.0f} are free"
            )
            return
        total = _write_checkpoint(folder, size)
        samples: dict[str, list[float]] = {"ours": [], "disk": [], "theirs": []}
        extra: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(num_samples):
            _drop_cache(folder)
            samples["disk"].append(total / _disk_s(folder))
            for who, program, command in (("ours", _OURS, launch), ("theirs", _THEIRS, [sys.executable])):
                _drop_cache(folder)
                found = _run(program, folder, command)
                samples[who].append(total / found["seconds"])
                extra[who].append(found["extra_bytes"])
    yield Row(
        name=f"{total / GB:.2g} GB into {NUM_RANKS} sharded ranks",
        unit=Unit.BYTES_PER_SECOND,
        ours=Measurement.of(samples["ours"]),
        rivals={
            "the disk": Measurement.of(samples["disk"]),
            "from_pretrained, one process": Measurement.of(samples["theirs"]),
        },
    )
    shard = math.ceil(total / NUM_RANKS)
    yield Row(
        name="peak of further host memory, a rank",
        unit=Unit.BYTES,
        ours=Measurement.of(extra["ours"]),
        rivals={
            "the shard": Measurement.of([shard]),
            "from_pretrained, one process": Measurement.of(extra["theirs"]),
        },
    )


CASE = Case(
    title="Loading: a checkpoint into sharded ranks",
    about="""A Llama-shaped checkpoint in bf16, in several safetensors files, which the page cache has let go. Ours
    builds the model on the meta device and reads each rank's shard; time is from parallelize() to the last barrier.
    The disk is what as many processes reach that only read; transformers' from_pretrained loads the whole model in one
    process, and its tensors are touched, as a step would. Memory is the growth of the peak resident set.
    Free memory is touched before each clock starts: a virtual machine gets it from its host on first use.
    TORSH_BENCH_GB is the size, TORSH_BENCH_DIR the disk.""",
    rows=_rows,
)

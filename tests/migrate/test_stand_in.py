"""Another library's names, in this process only, and never over a package that is in use."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bed.programs import be_program
from tests.bed.world import World
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate import install

pytestmark = pytest.mark.ranks

SCRIPT = """
import importlib, sys
import torsh_distributed as td
td.migrate.install("horovod")
td.migrate.install("horovod")
import horovod, horovod.torch as hvd
from horovod.torch.mpi_ops import Sum, _basics
from horovod.torch.elastic.state import TorchState
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import extension_available
from horovod.common.process_sets import ProcessSet
from horovod.common.elastic import run_fn, ObjectState
from horovod.torch.compression import Compression
from horovod.torch.functions import broadcast_object
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm
from horovod.runner import run
assert horovod.run is run and horovod.__version__ and extension_available("torch")
assert hvd.mpi_ops.Sum is hvd.Sum and hvd.elastic.TorchState is TorchState
assert not hasattr(hvd, "callbacks")
for missing in ("horovod.run.runner", "horovod.tensorflow", "horovod.torch.callbacks"):
    try:
        importlib.import_module(missing)
    except ImportError as error:
        print(error)
    else:
        raise SystemExit(missing)
td.migrate.uninstall("horovod")
try:
    import horovod.torch
except ImportError:
    sys.exit(0)
sys.exit("still there" if "real" not in sys.argv else 0)
"""


def output_of(source: str, folder: Path, world: World) -> str:
    (folder / "program.py").write_text(source)
    (outcome,) = world.outcomes(be_program, folder / "program.py", num_ranks=1, backend=None)
    assert outcome.is_ok, outcome.trace
    return outcome.output


def test_modules_that_programs_import_are_there_and_others_say_so(tmp_path: Path, world: World) -> None:
    assert "horovod.tensorflow is not part of torsh_distributed's horovod" in output_of(SCRIPT, tmp_path, world)


DEEPSPEED = """
import importlib, importlib.metadata, importlib.util
import torsh_distributed as td
td.migrate.install("deepspeed")
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.compression.compress import init_compression, redundancy_clean
from deepspeed.compression.helper import recursive_getattr, recursive_setattr
from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd
from deepspeed.utils.zero_to_fp32 import get_optim_files
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES, WarmupLR
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from deepspeed.utils import RepeatingLoader, groups, log_dist, safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
assert deepspeed.zero.Init is deepspeed.runtime.zero.Init and deepspeed.comm.ReduceOp.SUM is not None
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.util.find_spec("deepspeed.ops.adam") is not None
for asked in ("deepspeed.ops.deepspeed4science", "deepspeed.nothing"):  # as OpenFold does before it imports one
    assert importlib.util.find_spec(asked) is None
assert OpBuilder.is_rocm_pytorch() is False
found = importlib.metadata.metadata("deepspeed")
assert importlib.metadata.version("deepspeed") == deepspeed.__version__ and found["Author"] == "torsh-distributed"
assert importlib.metadata.version("torch")
get_accelerator().device_count()
for missing in ("deepspeed.ops.sparse_attention", "deepspeed.nothing"):
    try:
        importlib.import_module(missing)
    except ImportError as error:
        print(error)
try:
    deepspeed.init_inference(None)
except RuntimeError as error:
    print(error)
try:
    redundancy_clean(None, {})
except RuntimeError as error:
    print(error)
td.migrate.uninstall("deepspeed")
try:
    importlib.metadata.metadata("deepspeed")
except importlib.metadata.PackageNotFoundError:
    print("gone")
"""


def test_deepspeed_is_there_with_its_metadata_and_refuses_by_name(tmp_path: Path, world: World) -> None:
    output = output_of(DEEPSPEED, tmp_path, world)
    assert "sparse attention is compiled code: use torch's FlexAttention" in output
    assert "deepspeed.nothing is not part of torsh_distributed's deepspeed, which has: deepspeed," in output
    assert "init_inference is not part of torsh_distributed's deepspeed" in output
    assert "redundancy_clean is not part of torsh_distributed's deepspeed" in output
    assert output.endswith("gone\n")


RUN_AS_HOROVOD = (
    *(sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--as", "horovod"),
    *("--start-method", "spawn"),  # the scripts do without torch: nothing has to import it for them
)


def test_a_real_package_is_hidden_by_choice_and_said_once(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = 'real'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import horovod\nimport os; print('version', horovod.__version__, os.environ.get('HOROVOD_SIZE'), "
        "os.environ.get('HOROVOD_HOSTNAME'))\n"
    )
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert plain.stdout == "version real None None\n"
    line = [*RUN_AS_HOROVOD, str(script)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert f"version 0.28.1 1 {socket.gethostname()}" in done.stdout, done.stderr
    assert done.stderr.count("is hidden by torsh_distributed's") == 1


def test_a_folder_of_that_name_is_no_package_to_hide(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()  # as in a repository of examples
    script = tmp_path / "script.py"
    script.write_text("import horovod\nprint('version', horovod.__version__)\n")
    line = [*RUN_AS_HOROVOD, str(script)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert "version 0.28.1" in done.stdout, done.stderr
    assert "is hidden" not in done.stderr


def test_an_unknown_library_and_a_late_install_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="no stand-in") as caught:
        install("horovd")
    assert caught.value.hint == "did you mean 'horovod'?"
    monkeypatch.setitem(sys.modules, "horovod", sys)
    with pytest.raises(InvalidArgument, match="imported already"):
        install("horovod")

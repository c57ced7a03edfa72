"""The exception tree: every error says what broke, with which facts, and what to do about it.

::

    TorshError
    ├── CommunicationError        retryable   a collective, p2p or socket operation failed (ConnectionError)
    │   ├── OperationTimeout      retryable   a bounded wait expired (TimeoutError, RuntimeError)
    │   ├── ProcessFailure        retryable   a process died or was declared dead
    │   └── BackendError          retryable   gloo, nccl, mpi or shm reported an error
    ├── IoError                   retryable   file or socket I/O (OSError)
    ├── CheckpointError           retryable   save, verify or load failed
    ├── BackendNotInitialized                 an operation before init (RuntimeError)
    ├── InvalidArgument                       a bad argument (ValueError)
    │   ├── RankOutOfBounds                   a rank outside 0..world_size-1
    │   └── TensorShapeMismatch               shapes or dtypes differ between ranks or from the contract
    ├── ConfigurationError                    an invalid Plan or environment (ValueError)
    ├── FeatureNotAvailable                   missing hardware, package or build option (RuntimeError)
    ├── ProcessGroupNotFound                  an unknown group (LookupError)
    ├── JobNotFound                           an unknown job (LookupError)
    ├── MemoryAllocationFailed                out of memory on host or device (MemoryError)
    ├── SerializationError                    encode or decode failed (ValueError)
    │   └── CompressionError                  a payload is damaged or of another codec
    ├── RemoteError                           a function that was called in another process raised (RuntimeError)
    ├── NonFiniteLoss                         the loss or the gradients are nan or infinite (ArithmeticError)
    └── InternalError                         a broken invariant: our bug (RuntimeError)

Whether to retry is decided by type (`retryable`), never by searching the text. Imports no torch: plans and the command
line raise these errors too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from typing_extensions import override


class TorshError(Exception):
    """Root of the tree: a message, the facts that broke the rule, and a hint.

    Facts are keyword arguments in the user's spelling; most errors have `operation`, `group` or `rank`. The error
    pickles with all of them because it crosses processes.
    """

    retryable: ClassVar[bool] = False
    world_peers: tuple[int, ...] = ()
    """The ranks of the world that the error points to, where its facts name ranks of a smaller group."""
    advice: ClassVar[tuple[str, ...]] = (
        "read the facts under `got:`; they are the values that broke the rule",
        "run again with TORSH_DEBUG=1 for checks on every collective",
        "run with TORSH_EVENTS_DIR=DIR and look at the last events of each rank",
        "run `torsh explain CODE` for the usual causes of this error",
    )

    def __init__(self, message: str, *, hint: str | None = None, **context: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.context = context

    @property
    def code(self) -> str:
        """The name that `torsh explain` takes for this error."""
        return type(self).__name__

    @property
    def operation(self) -> str | None:
        """The operation that failed, if one is named."""
        return self.context.get("operation")

    @property
    def rank(self) -> int | None:
        """The rank the error is about, if one is named."""
        return self.context.get("rank")

    @property
    def hints(self) -> tuple[str, ...]:
        """What to do, most specific first: the hint of this error, then the advice for its class."""
        return ((self.hint,) if self.hint else ()) + self.advice

    def to_dict(self) -> dict[str, Any]:
        """The error as plain JSON values, for events and reports."""
        context = {
            key: value if isinstance(value, str | int | float | bool | None) else repr(value)
            for key, value in self.context.items()
        }
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "retryable": self.retryable,
            "context": context,
        }

    @override
    def __str__(self) -> str:
        facts = ", ".join(f"{key}={_show(value)}" for key, value in self.context.items() if value is not None)
        lines = [self.message]
        if facts:
            lines.append(f"  got:  {facts}")
        lines.append(f"  hint: {self.hints[0]}")
        return "\n".join(lines)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.context, self.__cause__)


def _rebuild(
    kind: type[TorshError], message: str, hint: str | None, context: dict[str, Any], cause: BaseException | None
) -> TorshError:
    error = kind(message, hint=hint, **context)
    error.__cause__ = cause
    return error


def _show(value: Any) -> str:
    return value if isinstance(value, str) and value and " " not in value else repr(value)


class CommunicationError(TorshError, ConnectionError):
    """A collective, point-to-point or socket operation failed."""

    retryable = True
    advice = (
        "look at the first rank that failed, not the last; `torsh run` names it",
        "check that every rank calls the same collectives in the same order (TORSH_DEBUG=1 does)",
        "check that the nodes reach each other on the chosen interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
        "the whole group must agree on a retry: restart the step on every rank, not on one",
    )


class OperationTimeout(CommunicationError, TimeoutError, RuntimeError):
    """A bounded wait expired; `missing_ranks` names the absent ranks if they are known.

    A RuntimeError too, because that is what scripts for torch's own backends catch.
    """

    advice = (
        "find out why the missing ranks did not arrive: look at their output, exit status and stack",
        "check that all ranks take the same branch before a collective (rank-0-only saves are the usual culprit)",
        "check that MASTER_ADDR and MASTER_PORT are the same and reachable on every node",
        "raise the timeout if the work before the call is really that long",
    )


class ProcessFailure(CommunicationError):
    """A process of the job died or was declared dead."""

    advice = (
        "read the last lines of the process's stderr, shown by `torsh run` and kept with --log-dir",
        "SIGKILL most often comes from the kernel when memory runs out: lower the batch size or shard the model",
        "start with `torsh run --max-restarts N` so the job continues after losing a process",
        "save checkpoints more often so less work is lost",
    )


class BackendError(CommunicationError):
    """The library that moves the bytes reported an error."""

    advice = (
        "read the backend's own message under `got:`",
        "try another backend to see whether the library is at fault: backend='gloo' works everywhere on CPU",
        "check the backend's requirements with `torsh env`",
        "destroy the group and initialise again; a group that has failed cannot be reused",
    )


class IoError(TorshError, OSError):
    """File or socket input/output failed."""

    retryable = True
    advice = (
        "check that the path exists and that this user may read or write it",
        "check the free space and inodes of the file system (`df -h`, `df -i`)",
        "on a network file system, check that it is mounted on every node",
        "check the limit of open files (`ulimit -n`)",
    )


class CheckpointError(TorshError):
    """A checkpoint could not be saved, verified or loaded."""

    retryable = True
    advice = (
        "load the previous checkpoint; one that was being written when the job died never counts as complete",
        "check the free space of the checkpoint directory",
        "check that every rank sees the same directory",
        "check that the plan and the model are those that wrote it",
    )


class BackendNotInitialized(TorshError, RuntimeError):
    """An operation needs the process group, which is not initialised."""

    advice = (
        "call torsh_distributed.init() first, on every rank",
        "start the script with `torsh run --nproc-per-node N script.py`",
        "check that destroy_process_group() has not been called",
        "do not use a group across fork(); initialise it in the child",
    )


class InvalidArgument(TorshError, ValueError):
    """An argument is not one that the function accepts."""

    advice = (
        "compare the value under `got:` with what the message allows",
        "check the function's docstring for shapes and units",
        "check that all ranks pass the same value",
        "check the type: numbers from files or the environment may arrive as text",
    )


class RankOutOfBounds(InvalidArgument):
    """A rank is outside 0..world_size-1."""

    advice = (
        "ranks start at 0: the last one is world_size - 1",
        "do not confuse LOCAL_RANK with the global RANK",
        "compare WORLD_SIZE with the number of processes started",
        "src and dst are global ranks, also in a sub-group, unless the docstring says otherwise",
    )


class TensorShapeMismatch(InvalidArgument):
    """Shapes or dtypes differ between ranks, or from what the operation needs."""

    advice = (
        "print shape and dtype on every rank just before the call",
        "set drop_last=True, or pad, if the last batch is smaller on some ranks",
        "check that every rank built the same model",
        "TORSH_DEBUG=1 compares shape, dtype and operation across ranks before each collective",
    )


class ConfigurationError(TorshError, ValueError):
    """A plan or an environment variable is invalid."""

    advice = (
        "run `torsh plan validate FILE`: it reports every problem at once",
        "run `torsh plan schema` for all keys, their types and defaults",
        "run `torsh env` for the variables in use and where each comes from",
        "start from a plan in examples/plans and change one thing at a time",
    )


class FeatureNotAvailable(TorshError, RuntimeError):
    """Hardware, a package or a build option is missing."""

    advice = (
        "install the extra that the message names",
        "run `torsh env` to see what this machine offers",
        "choose a backend or method with fewer requirements",
        "check that the package is installed in the environment that runs the job, on every node",
    )


class ProcessGroupNotFound(TorshError, LookupError):
    """No group of that name or id exists."""

    advice = (
        "compare the name with the groups listed under `got:`",
        "create groups on every rank in the same order, also on ranks that are not members",
        "a removed group is gone on all ranks: create it again",
        "destroy_process_group() removes all groups",
    )


class JobNotFound(TorshError, LookupError):
    """No job of that name, id or process id is known here, or several are."""

    advice = (
        "`torsh doctor --job all` lists the jobs whose launchers run on this machine; ask on the machine of node 0",
        "`torsh jobs` lists the jobs that this user submitted to a cluster from here",
        "give the launcher's pid, not a worker's",
        "a job that has ended leaves its logs and events, but cannot be asked any more",
    )


class MemoryAllocationFailed(TorshError, MemoryError):
    """Host or device memory ran out."""

    advice = (
        "lower the batch size and accumulate gradients instead",
        "shard parameters and optimizer state over the ranks",
        "checkpoint activations",
        "offload optimizer state to the host",
    )


class SerializationError(TorshError, ValueError):
    """Bytes could not be encoded or decoded."""

    advice = (
        "check that both sides run the same version",
        "check that the bytes are not truncated: compare lengths on both sides",
        "only plain values can be sent: numbers, text, bytes, lists, dicts, tensors",
        "nothing from a socket is unpickled: convert the object to plain values first",
    )


class CompressionError(SerializationError):
    """A compressed message is damaged, or its codec or size is not what this rank expects."""

    advice = (
        "check that every rank has the same compression settings and the same model",
        "check that every rank runs the same version",
        "a damaged message points to faulty memory or network: check the node of the rank that the message names",
        "train with compress.method = none to see whether the codec is the cause",
    )


class RemoteError(TorshError, RuntimeError):
    """A function that was called in another process raised.

    Also an instance of what it raised there, if that is a common type of Python or of this library, so `except
    ValueError` works as for a local call. `traceback` is the callee's.
    """

    type_name: str = "Exception"
    """What was raised there."""
    traceback: str = ""
    """Of the callee, as text."""
    advice = (
        "read the callee's traceback: it is the error's note and its `traceback`",
        "the callee goes on: an error of a function does not end its worker",
        "check the arguments as they arrive there: tuples stay tuples, a dataclass must be registered on both sides",
        "an error that the callee raises by design can be caught here by its type",
    )


class NonFiniteLoss(TorshError, ArithmeticError):
    """The loss or the gradients are nan or infinite; the parameters are unchanged."""

    advice = (
        "look at that rank's batch in that step for nan in the data, an empty mask, log(0) or division by 0",
        "lower the learning rate, or warm it up (training.warmup_steps)",
        "clip the gradients (training.gradient_clipping)",
        "run the step again under torch.autograd.detect_anomaly() to find the operation",
    )


class InternalError(TorshError, RuntimeError):
    """An internal invariant is broken; the user did nothing wrong."""

    advice = (
        "please report it with the message and the traceback",
        "run `torsh env` and add its output to the report",
        "run with TORSH_DEBUG=1 and add the first error",
        "try the previous version to see whether the problem is new",
    )


def error_codes() -> dict[str, type[TorshError]]:
    """Every class of the tree by its code."""
    found: dict[str, type[TorshError]] = {}
    pending: list[type[TorshError]] = [TorshError]
    while pending:
        kind = pending.pop()
        found.setdefault(kind.__name__, kind)  # a RemoteError that is also another type is a class with its name
        pending.extend(kind.__subclasses__())
    return dict(sorted(found.items()))


@contextmanager
def translate_errors(operation: str, **context: Any) -> Iterator[None]:
    """Turn torch's and the system's exceptions into ours, keeping the cause.

    Why: torch raises five unrelated types for the same event; callers catch one tree.
    """
    try:
        yield
    except TorshError:
        raise
    except Exception as error:
        translated = _translated(error, {"operation": operation, **context})
        if translated is None:
            raise
        raise translated from error


def _translated(error: Exception, context: dict[str, Any]) -> TorshError | None:
    """The order matters: torch reports timeouts as store errors or as the built-in TimeoutError."""
    import torch
    import torch.distributed as dist

    message = first_line(error)
    if isinstance(error, dist.DistStoreError | TimeoutError):
        return OperationTimeout(message, **context)
    if isinstance(error, dist.DistNetworkError):
        return CommunicationError(message, **context)
    if isinstance(error, dist.DistBackendError):
        return BackendError(message, **context)
    if isinstance(error, torch.OutOfMemoryError):
        return MemoryAllocationFailed(message, **context)
    if isinstance(error, ConnectionError):
        return CommunicationError(message, **context)
    if isinstance(error, OSError):
        return IoError(message, errno=error.errno, **context)
    return None


def first_line(error: BaseException) -> str:
    """What an exception says, on one line; its type if it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def missing_extra(extra: str, what: str) -> FeatureNotAvailable:
    """The error for a package of an extra that is not installed; `what` needs it."""
    return FeatureNotAvailable(f"{what} needs a package", hint=f'pip install "torsh-distributed[{extra}]"', extra=extra)

"""The exception tree. Every error says what broke, with which facts, and what to do about it.

::

    TorshError
    ├── CommunicationError        retryable   a collective, p2p or socket operation failed (ConnectionError)
    │   ├── OperationTimeout      retryable   a bounded wait expired (TimeoutError)
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
    ├── MemoryAllocationFailed                out of memory on host or device (MemoryError)
    ├── SerializationError                    encode or decode failed (ValueError)
    │   └── CompressionError                  a payload is damaged, foreign, or of another codec
    ├── NonFiniteLoss                         the loss or the gradients are nan or infinite (ArithmeticError)
    └── InternalError                         a broken invariant: our bug (RuntimeError)

Whether to retry is decided by type (`retryable`), never by searching the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from typing_extensions import override


class TorshError(Exception):
    """Root of the tree: a message, the facts that broke the rule, and a hint.

    Facts are keyword arguments in the user's spelling; `operation`, `group` and `rank` are the ones
    shared by most errors. The error pickles with all of them, for it crosses processes.
    """

    retryable: ClassVar[bool] = False
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
        """The name under which `torsh explain` knows this error."""
        return type(self).__name__

    @property
    def operation(self) -> str | None:
        """The operation that failed, if one is named."""
        return self.context.get("operation")

    @property
    def rank(self) -> int | None:
        """The rank the error speaks of, if one is named."""
        return self.context.get("rank")

    @property
    def hints(self) -> tuple[str, ...]:
        """What to do, most specific first: the hint of this error, then the advice for its kind."""
        return ((self.hint,) if self.hint else ()) + self.advice

    def to_dict(self) -> dict[str, Any]:
        """The error as JSON-ready values, for events and reports."""
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
        "look at the first rank that failed, not the last: `torsh run` names it",
        "check that every rank calls the same collectives in the same order (TORSH_DEBUG=1 does)",
        "check that the nodes reach each other on the chosen interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
        "a retry must be agreed by the whole group: restart the step on every rank, not on one",
    )


class OperationTimeout(CommunicationError, TimeoutError):
    """A bounded wait expired; `missing_ranks` names the absent where that is known."""

    advice = (
        "find out why the missing ranks did not arrive: their output, exit status and stack",
        "check that all ranks take the same branch before a collective (rank-0-only saves are the usual culprit)",
        "check that MASTER_ADDR and MASTER_PORT are the same and reachable on every node",
        "raise the timeout if the work before the call is really that long",
    )


class ProcessFailure(CommunicationError):
    """A process of the job died or was declared dead."""

    advice = (
        "read the last lines of the process's stderr, shown by `torsh run` and kept with --log-dir",
        "an exit by SIGKILL is most often the kernel out of memory: lower the batch or shard the model",
        "start with `torsh run --max-restarts N` so that the job goes on after a lost process",
        "save checkpoints more often so that less is lost",
    )


class BackendError(CommunicationError):
    """The library that moves the bytes reported an error."""

    advice = (
        "read the backend's own message under `got:`",
        "try another backend to tell the library from the program: backend='gloo' works everywhere on CPU",
        "check the backend's requirements with `torsh env`",
        "destroy the group and initialise anew; a group that failed once does not work again",
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
        "run `torsh verify DIR` to see which checkpoints are whole",
        "load the previous checkpoint; the one being written when a job dies is never taken for whole",
        "check the free space of the checkpoint directory",
        "check that every rank sees the same directory",
    )


class BackendNotInitialized(TorshError, RuntimeError):
    """An operation that needs the process group came before it was initialised."""

    advice = (
        "call torsh_distributed.init() first, on every rank",
        "start the script with `torsh run --nproc-per-node N script.py`",
        "check that destroy_process_group() was not called before",
        "do not use a group across fork(): initialise in the child",
    )


class InvalidArgument(TorshError, ValueError):
    """An argument is outside what the function takes."""

    advice = (
        "compare the value under `got:` with what the message allows",
        "check the function's docstring for shapes and units",
        "check that all ranks pass the same value",
        "check the type: numbers from files or the environment may arrive as text",
    )


class RankOutOfBounds(InvalidArgument):
    """A rank lies outside 0..world_size-1."""

    advice = (
        "ranks count from 0: the last one is world_size - 1",
        "do not use LOCAL_RANK where the global RANK is meant, or the other way round",
        "check WORLD_SIZE against the number of processes started",
        "in a sub-group, ranks of src and dst are global unless said otherwise",
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
        "run `torsh env` for the variables in force and where each came from",
        "start from a plan in examples/plans and change one thing at a time",
    )


class FeatureNotAvailable(TorshError, RuntimeError):
    """Hardware, a package or a build option is missing."""

    advice = (
        "install the extra that the message names",
        "run `torsh env` to see what this machine offers",
        "choose another backend or method that needs less",
        "check that the package is installed in the environment that runs the job, on every node",
    )


class ProcessGroupNotFound(TorshError, LookupError):
    """No group of that name or id exists."""

    advice = (
        "compare the name with the groups listed under `got:`",
        "create the group on every rank, in the same order, members or not",
        "a removed group is gone on all ranks: create it anew",
        "groups do not outlive destroy_process_group()",
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
        "check that the bytes were not cut: compare lengths on both sides",
        "only plain values travel: numbers, text, bytes, lists, dicts, tensors",
        "what came over a socket is never unpickled: convert the object to plain values first",
    )


class CompressionError(SerializationError):
    """A compressed message is damaged, or was made by another codec or for another size than this rank expects."""

    advice = (
        "check that every rank has the same compression settings and the same model",
        "check that every rank runs the same version",
        "a damaged message is a fault of memory or network: look at the node of the rank that is named",
        "train with compress.method = none to tell the codec from the rest",
    )


class NonFiniteLoss(TorshError, ArithmeticError):
    """The loss or the gradients are nan or infinite; no parameter was changed by them."""

    advice = (
        "look at that rank's batch of that step: nan in the data, an empty mask, log or division by 0",
        "lower the learning rate, or warm it up (training.warmup_steps)",
        "clip the gradients (training.gradient_clipping)",
        "run the step again under torch.autograd.detect_anomaly() to find the operation",
    )


class InternalError(TorshError, RuntimeError):
    """An invariant of ours is broken; the user did nothing wrong."""

    advice = (
        "please report it with the message and the traceback",
        "run `torsh env` and add its output to the report",
        "run with TORSH_DEBUG=1 and add the first error",
        "try the previous version to tell whether it is new",
    )


def error_codes() -> dict[str, type[TorshError]]:
    """Every class of the tree by its code, for `torsh explain` and the reference."""
    found: dict[str, type[TorshError]] = {}
    pending: list[type[TorshError]] = [TorshError]
    while pending:
        kind = pending.pop()
        found[kind.__name__] = kind
        pending.extend(kind.__subclasses__())
    return dict(sorted(found.items()))


@contextmanager
def translate_errors(operation: str, **context: Any) -> Iterator[None]:
    """Turn torch's and the system's exceptions into ours, keeping the cause.

    Why: torch raises five unrelated types for the same event; callers catch one tree. The order
    matters: torch's timeouts are store errors whose only mark is the built-in TimeoutError or the type.
    """
    try:
        yield
    except TorshError:
        raise
    except (dist.DistStoreError, TimeoutError) as error:
        raise OperationTimeout(_first_line(error), operation=operation, **context) from error
    except dist.DistNetworkError as error:
        raise CommunicationError(_first_line(error), operation=operation, **context) from error
    except dist.DistBackendError as error:
        raise BackendError(_first_line(error), operation=operation, **context) from error
    except torch.OutOfMemoryError as error:
        raise MemoryAllocationFailed(_first_line(error), operation=operation, **context) from error
    except ConnectionError as error:
        raise CommunicationError(_first_line(error), operation=operation, **context) from error
    except OSError as error:
        raise IoError(_first_line(error), operation=operation, errno=error.errno, **context) from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class ErrorCollector:
    """Gather what several parts of one operation returned or raised, and raise all failures at once."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.errors: list[Exception] = []
        self.results: list[Any] = []

    def add_error(self, error: Exception) -> None:
        """Keep a failure."""
        self.errors.append(error)

    def add_result(self, result: Any) -> None:
        """Keep a success."""
        self.results.append(result)

    @property
    def has_errors(self) -> bool:
        """Whether any part failed."""
        return bool(self.errors)

    def raise_if_any(self) -> None:
        """Raise an ExceptionGroup of every failure, or nothing."""
        if self.errors:
            total = len(self.errors) + len(self.results)
            raise ExceptionGroup(f"{self.operation}: {len(self.errors)} of {total} parts failed", self.errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.raise_if_any()

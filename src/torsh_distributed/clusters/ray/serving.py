"""`serve_model`: a trained export behind HTTP, by Ray Serve; on loopback unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torsh_distributed.clusters.ray.ray_connection import require_ray
from torsh_distributed.errors import InvalidArgument, IoError

if TYPE_CHECKING:
    from torch import nn

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """How a model is served."""

    host: str = LOOPBACK
    """Where HTTP listens; others than loopback reach everyone who reaches the node."""

    port: int = 8000
    """HTTP port."""

    num_replicas: int = 1
    """Processes that hold the model, at least."""

    max_replicas: int | None = None
    """Up to how many Ray may add under load; None keeps their number."""

    target_requests: int = 10
    """Requests in flight on each replica above which Ray adds one."""

    max_requests: int = 100
    """Requests that a replica takes at once; more wait."""

    cpus_per_replica: float = 1
    gpus_per_replica: float = 0

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or (self.max_replicas is not None and self.max_replicas < self.num_replicas):
            raise InvalidArgument(
                "num_replicas must be at least 1 and at most max_replicas",
                num_replicas=self.num_replicas,
                max_replicas=self.max_replicas,
            )


class ModelReplica:
    """Holds the model and answers requests: `{"inputs": [[…], …]}` gives `{"outputs": [[…], …]}`."""

    def __init__(self, build: Callable[[], nn.Module], directory: str) -> None:
        self._model = build()
        load_export(self._model, directory)
        self._model.eval()

    async def __call__(self, request: Any) -> Any:
        """One HTTP request."""
        from starlette.responses import JSONResponse

        try:
            inputs = (await request.json())["inputs"]
            return {"outputs": self.predict(inputs)}
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=400)

    def predict(self, inputs: Any) -> Any:
        """The model's outputs as nested lists."""
        import torch

        first = next(self._model.parameters())
        tensor = torch.as_tensor(inputs)
        if tensor.is_floating_point():
            tensor = tensor.to(first.dtype)
        with torch.inference_mode():
            return self._model(tensor.to(first.device)).tolist()


def load_export(model: nn.Module, directory: str | Path) -> None:
    """Load what `engine.export` wrote into a whole model, in this process alone; differences raise, all at once."""
    import torch

    from torsh_distributed.parallel.weights.stacked_tensor import whole_of
    from torsh_distributed.parallel.weights.tensor_files import stored_tensors
    from torsh_distributed.parallel.weights.weight_names import converted, match_names

    try:
        found = match_names(model, converted(model, stored_tensors(directory)), where=str(directory))
    except OSError as error:
        raise IoError(f"the export in {directory} cannot be read: {error}", operation="serve") from error
    with torch.no_grad():
        for name, held in model.state_dict(keep_vars=True).items():
            if name in found:
                held.detach().copy_(whole_of(found[name]))


def serve_model(
    build: Callable[[], nn.Module],
    directory: str | Path,
    *,
    name: str = "model",
    route: str = "/",
    config: ServeConfig | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> str:
    """Serve the model that `build()` makes, with the weights of an export; returns its URL when it answers.

    Uses the connection to Ray that this process has. `stop_serving` ends it.
    """
    chosen = config or ServeConfig()
    place = Path(directory).resolve()
    if not any(place.glob("*.safetensors")):
        raise InvalidArgument(
            f"there is no export in {place}", hint="write one with engine.export(directory)", directory=str(place)
        )
    ray = require_ray()
    if not ray.is_initialized():
        raise InvalidArgument("this process is not connected to Ray", hint="call ray.init() first")
    from ray import serve

    options: dict[str, Any] = {
        "name": name,
        "max_ongoing_requests": chosen.max_requests,
        "ray_actor_options": {
            "num_cpus": chosen.cpus_per_replica,
            "num_gpus": chosen.gpus_per_replica,
            **({"runtime_env": dict(runtime_env)} if runtime_env else {}),
        },
    }
    if chosen.max_replicas is None:
        options["num_replicas"] = chosen.num_replicas
    else:
        options["autoscaling_config"] = {
            "min_replicas": chosen.num_replicas,
            "max_replicas": chosen.max_replicas,
            "target_ongoing_requests": chosen.target_requests,
        }
    serve.start(http_options={"host": chosen.host, "port": chosen.port})
    bound = serve.deployment(**options)(ModelReplica).bind(build, str(place))
    serve.run(bound, name=name, route_prefix=route)
    host = f"[{chosen.host}]" if ":" in chosen.host else chosen.host
    return f"http://{host}:{chosen.port}{route}"


def stop_serving() -> None:
    """End Ray Serve and everything that it serves on this cluster."""
    from ray import serve

    serve.shutdown()

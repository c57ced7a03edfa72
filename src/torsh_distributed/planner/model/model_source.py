"""Finds a model by what a user types, with shapes and without memory: a function, or a config of transformers."""

from __future__ import annotations

import importlib
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, first_line
from torsh_distributed.plan.problems import did_you_mean

FORMS = "module:function, a folder with a config.json, or a model of transformers by name or kind, such as llama"


@dataclass(frozen=True)
class FoundModel:
    """A model on the meta device, with an example of its inputs if its function returned one."""

    model: nn.Module
    example: Any = None


def find_model(where: str) -> FoundModel:
    """The model that `where` names, without its weights; modules of this folder are found too.

    `module:function` returns a model, or (model, example): inputs whose first dim is the batch, as a tuple or by name.
    Else `where` is a folder or file of a config of transformers, the name of a model it knows or can download the
    config of, or a kind of model such as `llama`, in the size that is its default.
    """
    if ":" in where:
        return _from_function(where)
    _refuse_script(where)
    return FoundModel(_from_transformers(where))


def _refuse_script(where: str) -> None:
    """A script of this folder is not a model: said before such a name is looked up on the network."""
    module_name, _, name = where.rpartition(".")
    script = Path(where) if name == "py" else Path(f"{module_name.replace('.', '/')}.py")
    if module_name and script.is_file():
        spelling = f"{'.'.join(script.with_suffix('').parts)}:{'build_model' if name == 'py' else name}"
        raise ConfigurationError(
            f"{where} names no model: {script} is a script, and a function or class of it is needed",
            hint=f"such as {spelling}",
        )


def _from_function(where: str) -> FoundModel:
    module_name, _, name = where.partition(":")
    if not module_name or not name:
        raise ConfigurationError(f"{where}: not of the form module:function", hint="such as train:build_model")
    module = _imported(module_name, where)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"{where}: {_not_a_function(module, name)}", hint=_functions_of(module, name))
    made = _built_by(function, module, where)
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"{where}: it returns a {type(made).__name__}, not a model",
            hint="return an nn.Module, or (model, example inputs)",
        )
    # What `torch.compile` returned: its forward has no arguments of its own, and the estimate is of eager execution.
    return FoundModel(dict(model.named_children()).get("_orig_mod", model), example)


def _imported(module_name: str, where: str) -> ModuleType:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        is_file = module_name.endswith(".py")
        named = f"a module is named without .py: {module_name.removesuffix('.py').replace('/', '.')}:…"
        raise ConfigurationError(
            f"{where}: {error}",
            hint=named if is_file else "run it in the folder of the module, or name a module that is installed",
        ) from error
    except (Exception, SystemExit) as error:  # a module may do anything when it is imported
        raise ConfigurationError(
            f"{where}: {module_name} cannot be imported: {type(error).__name__}: {first_line(error)}",
            hint='keep what trains or reads arguments under if __name__ == "__main__"',
        ) from error
    finally:
        sys.path.remove(here)


def _not_a_function(module: ModuleType, name: str) -> str:
    if not hasattr(module, name):
        return f"{module.__name__} has no function {name}"
    kind = type(getattr(module, name)).__name__
    return f"{name} of {module.__name__} is of type {kind}, not a function that builds the model"


def _functions_of(module: ModuleType, name: str) -> str:
    own = [
        one
        for one, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    ]
    found = f"it has {', '.join(own[:8])}" if own else "write one that returns the model, or (model, example inputs)"
    return did_you_mean(name, own) or found


def _built_by(function: Callable[[], object], module: ModuleType, where: str) -> object:
    """What a function of the user's returns, its model without memory.

    On the meta device nothing is computed. Models that read values while they are built, such as dropout rates from
    `linspace`, are built on the CPU, where each parameter loses its memory once it is registered.
    """
    try:
        with torch.device("meta"):
            return function()
    except Exception as error:  # the user's code may raise anything
        if "meta" not in str(error):
            raise _build_failed(error, module, where) from error
    hook = register_module_parameter_registration_hook(_without_memory())  # type: ignore[arg-type]  # what it returns is used
    try:
        with torch.device("cpu"):
            return function()
    except Exception as error:
        raise _build_failed(error, module, where) from error
    finally:
        hook.remove()


def _without_memory() -> Callable[[nn.Module, str, nn.Parameter | None], nn.Parameter | None]:
    """A hook that registers parameters on the meta device instead; one that is shared stays shared."""
    made = WeakIdKeyDictionary()

    def on_meta(_: nn.Module, __: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:
            return None
        if param not in made:
            made[param] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        found: nn.Parameter = made[param]
        return found

    return on_meta


def _build_failed(error: Exception, module: ModuleType, where: str) -> ConfigurationError:
    frames = traceback.extract_tb(error.__traceback__)
    line = next((one.lineno for one in reversed(frames) if one.filename == module.__file__), None)
    place = "" if line is None else f", in line {line} of {Path(str(module.__file__)).name}"
    return ConfigurationError(
        f"{where} does not build its model: {type(error).__name__}: {first_line(error)}{place}",
        hint="it is called without arguments, and its parameters have shapes but no values: name a function that needs"
        " neither values nor a GPU, and loads no weights",
    )


def _from_transformers(where: str) -> nn.Module:
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise FeatureNotAvailable(
            f"{where} is not of the form module:function, and models of transformers need that package",
            hint='pip install "transformers", or name a function that builds your model: train:build_model',
        ) from error
    if where in CONFIG_MAPPING:
        config: Any = CONFIG_MAPPING[where]()
    else:
        try:
            config = transformers.AutoConfig.from_pretrained(where, local_files_only=not _is_hub_there())
        except (OSError, ValueError) as error:
            near = did_you_mean(where, [*CONFIG_MAPPING])
            raise ConfigurationError(
                f"{where} names no model: not of the form module:function, and transformers has no config for it"
                f" ({first_line(error)})",
                hint=near or f"give {FORMS}",
            ) from error
        except Exception as error:  # a config may be wrong in any way
            raise _refused(where, error) from error
    return _built(transformers, config, where)


def _is_hub_there() -> bool:
    """Whether the hub's name resolves: without a network its client would try again and again for half a minute."""
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    if not getproxies().keys().isdisjoint({address.scheme, "all"}):  # a proxy resolves it itself
        return True
    try:
        socket.getaddrinfo(address.hostname, address.port or address.scheme)
    except OSError:
        return False
    return True


def _built(transformers: Any, config: Any, where: str) -> nn.Module:
    """The model that one would train from a config: with a head for tokens, for classes, or without.

    Several heads exist for many kinds. An encoder with a decoder is trained as both, an encoder alone to fill gaps.
    """
    if getattr(config, "is_encoder_decoder", False):
        kinds = ["AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"]
    elif getattr(config, "is_decoder", False):
        kinds = ["AutoModelForCausalLM"]
    else:
        kinds = ["AutoModelForMaskedLM", "AutoModelForCausalLM"]
    kinds += ["AutoModelForImageClassification", "AutoModel"]
    for kind in kinds:
        try:
            with torch.device("meta"):
                built: nn.Module = getattr(transformers, kind).from_config(config)
            return built
        except (ValueError, TypeError):  # there is no such head, or several, of which a config without names says none
            continue
        except Exception as error:  # a config may lack what its model reads, in any way
            raise _refused(where, error) from error
    raise ConfigurationError(
        f"{where}: transformers builds no model of {type(config).__name__}",
        hint="name a function that builds your model: train:build_model",
    )


def _refused(where: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"{where}: its config builds no model: {type(error).__name__}: {first_line(error)}",
        hint="complete the config, or name a function that builds your model: train:build_model",
    )

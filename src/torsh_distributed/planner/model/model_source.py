"""Finds a model by what a user types, with shapes and without memory: a function, or a config of transformers."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    return FoundModel(_from_transformers(where))


def _from_function(where: str) -> FoundModel:
    module_name, _, name = where.partition(":")
    if not module_name or not name:
        raise ConfigurationError(f"{where}: not of the form module:function", hint="such as train:build_model")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{where}: {error}", hint="run it in the folder of the module, or name a module that is installed"
        ) from error
    finally:
        sys.path.remove(here)
    function = getattr(module, name, None)
    if not callable(function):
        near = did_you_mean(name, [one for one in vars(module) if not one.startswith("_")])
        raise ConfigurationError(f"{where}: {module_name} has no function {name}", hint=near or None)
    with torch.device("meta"):
        made: Any = function()
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"{where}: it returns a {type(made).__name__}, not a model",
            hint="return an nn.Module, or (model, example inputs)",
        )
    return FoundModel(model, example)


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
            config = transformers.AutoConfig.from_pretrained(where)
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

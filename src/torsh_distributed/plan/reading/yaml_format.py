"""YAML for plans: numbers as YAML 1.2 reads them, a key given twice refused, and text that comes back exactly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml
from typing_extensions import override

from torsh_distributed.plan.reading.malformed import MalformedError, position

# PyYAML follows YAML 1.1, where 1e-3 is text: a learning rate would arrive as a string. Both classes below read
# and quote numbers as YAML 1.2 does. They can go once PyYAML speaks 1.2.
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$")


class _YamlLoader(yaml.SafeLoader):
    """Safe loading that refuses a key given twice instead of keeping the last."""

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} is given twice", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _YamlDumper(yaml.SafeDumper):
    """Safe dumping that `_YamlLoader` reads back exactly: same numbers, and text with line breaks escaped."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Double quotes escape what plain and single-quoted text would lose, such as U+0085."""
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_YamlDumper.add_representer(str, _YamlDumper.represent_text)
for _kind in (_YamlLoader, _YamlDumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse(text: str) -> object:
    """The document in `text`; raises MalformedError."""
    try:
        return yaml.load(text, Loader=_YamlLoader)  # noqa: S506  # _YamlLoader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = (mark.line + 1, mark.column + 1) if mark is not None else None
        raise MalformedError(error.problem or "malformed", place) from error
    except yaml.reader.ReaderError as error:
        raise MalformedError(error.reason, position(text[: error.position])) from error
    except RecursionError as error:
        raise MalformedError("nested too deeply") from error
    except ValueError as error:  # for example an impossible date
        raise MalformedError(str(error)) from error


def render(document: Mapping[str, Any]) -> str:
    """The document as YAML, keys in their order."""
    return yaml.dump(document, Dumper=_YamlDumper, sort_keys=False, allow_unicode=True)

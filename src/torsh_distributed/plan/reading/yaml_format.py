"""YAML for plans: numbers as YAML 1.2 reads them, a key given twice refused, and text that comes back exactly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml
from typing_extensions import override

from torsh_distributed.plan.reading.limits import MAX_DEPTH, MAX_DIGITS, MAX_EXPANDED_CHARS, MalformedError, position

# PyYAML follows YAML 1.1, where 1e-3 is text: a learning rate would arrive as a string. Both classes below read
# and quote numbers as YAML 1.2 does. They can go once PyYAML speaks 1.2.
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$")


class _YamlLoader(yaml.SafeLoader):
    """Safe loading that refuses a key given twice instead of keeping the last, and a document that expands hugely.

    Why expansion is counted: an alias costs nothing here, but a merge (`<<`) and whoever walks through the result
    later pay for everything that it stands for, and aliases of aliases multiply.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._num_chars = 0
        self._chars_of: dict[int, int] = {}
        """What nodes expand to, by id; a node that is being composed is not there yet."""

    @override
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # Any: PyYAML's own index of a child. The event is looked at before super() takes it.
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._num_chars
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refusal(f"nested more than {MAX_DEPTH} levels deep", event)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._chars_of:
                raise _refusal(f"the alias {event.anchor} is inside what it stands for", event)
            self._num_chars += self._chars_of[id(node)]
        else:
            self._num_chars += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
            self._chars_of[id(node)] = self._num_chars - before
        if self._num_chars > MAX_EXPANDED_CHARS:
            raise _refusal(f"its aliases stand for more than {MAX_EXPANDED_CHARS // 1024} KB", event)
        return node

    @override
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and len(node.value) > MAX_DIGITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number of more than {MAX_DIGITS} digits", node.start_mark
            )
        return super().construct_object(node, deep=deep)

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


def _refusal(reason: str, event: yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, reason, event.start_mark)  # type: ignore[arg-type]  # the C parser's mark


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

"""Context parallelism for models of transformers: attention through their registry, positions in the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument, TensorShapeMismatch
from torsh_distributed.parallel.context import attention_interface
from torsh_distributed.parallel.context.attention_interface import SplitAttention, configs_of, implementing
from torsh_distributed.parallel.context.context_check import AttentionFacts
from torsh_distributed.parallel.context.positions import Form, take_positions
from torsh_distributed.parallel.models.example_inputs import named_inputs, takes
from torsh_distributed.parallel.models.label_share import LabelRule, PartCounts, require_labels, shifted, shifts_labels


class InterfaceContext:
    """Lets a model of transformers run on this rank's positions; `check_context` has found that it can.

    Every rank of the group creates one. A batch is given whole to every rank: `take` returns this rank's part with
    explicit position ids, and with labels shifted before they are split, so the label of a part's last token is that of
    the token after it, on another rank.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, *, form: Form, facts: AttentionFacts) -> None:
        self.group, self._model, self._facts = group, model, facts
        self._attention = SplitAttention(group, form)
        self._configs = configs_of(model)
        self._name = attention_interface.register(self._attention, self._attention.rule)
        self.labels = LabelRule()
        """Which labels the loss counts."""
        self.counts: PartCounts | None = None
        """What else it counts, in place of them."""
        self.weight: Tensor | None = None
        """What the loss of the batch taken last is multiplied by, so the mean over the ranks is that of all labels."""

    def close(self) -> None:
        """Take the attention out of transformers' registry."""
        attention_interface.unregister(self._name)

    def rows_from(self, first_row: Callable[[int], int]) -> None:
        """Masks are those of a microbatch: `first_row` gives its first row in the batch."""
        self._attention.first_row = first_row

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Around forward and backward: attention is over the whole sequence."""
        with implementing(self._configs, self._name):
            yield

    def take(self, batch: Any, *, has_loss_fn: bool) -> Any:
        """This rank's part of a batch: of (inputs, targets) for a loss_fn, otherwise of the model's inputs."""
        if has_loss_fn:
            given, targets = batch
            inputs = self._inputs(named_inputs(self._model, given))
            part = self._split_all(targets)
            if self.counts is not None and self.counts.count is not None:
                everyone = [(None, self._split_all(targets, rank)) for rank in range(self.group.size())]
                self.weight = self.counts.share_of((None, part), everyone)
                return inputs, self.counts.guarded((None, part))[1]
            self.weight = self.labels.share_of(part, targets, self.group.size())
            is_mean = self.weight is not None and not self.labels.is_sum
            return inputs, self.labels.with_a_label(part) if is_mean else part
        named = named_inputs(self._model, batch)
        inputs = self._inputs({name: value for name, value in named.items() if name != "labels"})
        return {**inputs, **self._labels(named)}

    def _labels(self, named: Mapping[str, Any]) -> dict[str, Tensor]:
        kind = type(self._model).__name__
        labels = require_labels(named, kind)
        if labels.dim() != 2 or labels.shape[1] != self._length:
            raise FeatureNotAvailable(
                f"{kind} has one label for a whole sequence, and no rank has a whole one",
                hint="set mesh.cp = 1, or train it with a label for each token",
                labels=tuple(labels.shape),
            )
        if not self._facts.takes_shifted:
            raise FeatureNotAvailable(
                f"{kind} computes its loss in a way of its own, which need not fit parts of a sequence",
                hint="pass loss_fn to parallelize(), with batches of (inputs, targets): targets are the next tokens",
            )
        name = "shift_labels" if shifts_labels(self._model) else "labels"
        whole = shifted(labels) if name == "shift_labels" else labels
        part = self._split(whole)
        self.weight = self.labels.share_of(part, whole, self.group.size())
        part = self.labels.with_a_label(part)
        return {"labels": part, name: part}

    def _inputs(self, named: dict[str, Any]) -> dict[str, Any]:
        """This rank's positions of the model's inputs, with position ids and a mask that hides nothing here."""
        ids = named.get("input_ids", named.get("inputs_embeds"))
        if not isinstance(ids, Tensor):
            raise InvalidArgument("the batch has no input_ids", hint="mesh.cp splits the sequences of input_ids")
        self._length = ids.shape[1]
        self._note_mask(named, ids)
        if takes(self._model, "position_ids"):
            positions = torch.arange(self._length, device=ids.device)[None]
            named = {"position_ids": positions, **named}
        if takes(self._model, "attention_mask"):
            named = {**named, "attention_mask": torch.ones(ids.shape[:2], dtype=torch.long, device=ids.device)}
        return {name: self._split_all(value) for name, value in named.items()}

    def _note_mask(self, named: Mapping[str, Any], ids: Tensor) -> None:
        """Padding and packing of the whole sequences, for the attention."""
        mask, positions = named.get("attention_mask"), named.get("position_ids")
        self._attention.keys = self._attention.documents = None
        if isinstance(mask, Tensor):
            if mask.dim() != 2 or mask.shape != ids.shape[:2]:
                raise FeatureNotAvailable(
                    "a mask of your own for each pair of positions is not known to attention over split sequences",
                    hint="pass attention_mask as (batch, length), 0 for padding; or set mesh.cp = 1",
                    attention_mask=tuple(mask.shape),
                )
            keys = mask.bool()
            if not bool(keys.all()):
                if positions is None and bool((keys[:, 1:] & ~keys[:, :-1]).any()):
                    raise FeatureNotAvailable(
                        "the batch is padded on the left, and models disagree on the positions of what follows",
                        hint="pad on the right (tokenizer.padding_side = 'right'), or put position_ids into the batch",
                    )
                self._attention.keys = keys
        elif isinstance(positions, Tensor) and positions.dim() == 2:
            starts = positions[:, 1:] - positions[:, :-1] != 1
            if bool(starts.any()):
                rows = torch.nn.functional.pad(starts.long().cumsum(dim=1), (1, 0))
                self._attention.documents = rows.expand(ids.shape[0], -1)

    def _split_all(self, value: Any, rank: int | None = None) -> Any:
        if isinstance(value, Tensor):
            return self._split(value, rank) if value.dim() > 1 else value
        if isinstance(value, Mapping):
            return {key: self._split_all(one, rank) for key, one in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._split_all(one, rank) for one in value)
        return value

    def _split(self, value: Tensor, rank: int | None = None) -> Tensor:
        if value.shape[1] != self._length:
            raise TensorShapeMismatch(
                "the sequences of a batch differ in length, so they cannot be split equally",
                hint="give everything in the batch the same length along dim 1",
                lengths=(self._length, value.shape[1]),
            )
        of = self.group.rank() if rank is None else rank
        return take_positions(value, 1, length=self._length, rank=of, size=self.group.size())

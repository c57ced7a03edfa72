"""Codecs up and down: the weights of a plain loop that encodes and decodes by hand, and the bytes of its messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.federated.small_task import SmallTask
from tests.federated.strategies.test_equations import EPOCHS, first_model, locally_trained, values_of
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.registry import codec_names, make_codec
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.federated import FederatedConfig, Scaffold, SecureAggregation, simulate
from torsh_distributed.federated.random_seeds import derived_seed
from torsh_distributed.federated.rounds.round_order import model_seed

CLIENTS, ROUNDS = 4, 4


def config(**fields: Any) -> FederatedConfig:
    return FederatedConfig(rounds=ROUNDS, clients_per_round=CLIENTS, local_epochs=EPOCHS, **fields)


def passed(method: str, vector: Tensor, seed: int) -> tuple[Tensor, int]:
    """A vector after its way through a codec, and the message's bytes."""
    codec = make_codec(method)
    message = codec.encode(vector, Key(seed=seed))
    return codec.decode(message, vector.numel(), Key(seed=seed)), message.nbytes


@pytest.mark.parametrize(
    ("upload", "download", "feedback"),
    [("topk:0.1", "none", True), ("int8", "bf16", False), ("nbit:4", "int8", True), ("randomk:0.2", "none", True)],
)
def test_numbers_and_bytes_are_those_of_the_messages(upload: str, download: str, feedback: bool) -> None:
    task = SmallTask()
    done = simulate(task, num_clients=CLIENTS, config=config(upload=upload, download=download, error_feedback=feedback))
    plain = SmallTask()
    net, parts = first_model(plain), plain.partition(CLIENTS)
    x, left, total = values_of(net), [torch.zeros(())] * CLIENTS, sum(map(len, parts))
    for number in range(ROUNDS):
        start, num_down = passed(download, x, model_seed(number))
        update, num_up = torch.zeros_like(x), 0
        for client, part in enumerate(parts):
            whole = locally_trained(net, start, part) - start + left[client]
            seed = derived_seed(derived_seed(0, "attempt", 0), number, str(client), "codec")
            got, num_bytes = passed(upload, whole, seed)
            left[client] = whole - got if feedback else left[client]
            update += len(part) / total * got
            num_up += num_bytes
        x = x + update
        torch.testing.assert_close(task.seen[number], x, rtol=0, atol=1e-5)
        record = done.rounds[number]
        assert (record.bytes_up, record.bytes_down) == (num_up, CLIENTS * num_down)
    assert record.bytes_up < CLIENTS * x.nbytes


def test_error_feedback_finds_what_topk_alone_never_sends() -> None:
    """With 1 value in 20 a round the model is nearer to that of whole updates."""
    far = {}
    whole = SmallTask()
    long = {"rounds": 40, "clients_per_round": CLIENTS}
    simulate(whole, num_clients=CLIENTS, config=FederatedConfig(**long))  # type: ignore[arg-type]
    for feedback in (False, True):
        task = SmallTask()
        some = FederatedConfig(**long, upload="topk:0.05", error_feedback=feedback)  # type: ignore[arg-type]
        simulate(task, num_clients=CLIENTS, config=some)
        far[feedback] = (task.seen[-1] - whole.seen[-1]).norm().item()
    assert far[True] < 0.5 * far[False], far


def test_scaffold_keeps_its_controls_whole() -> None:
    exact, packed = SmallTask(), SmallTask()
    simulate(exact, num_clients=CLIENTS, config=config(strategy=Scaffold()))
    done = simulate(packed, num_clients=CLIENTS, config=config(strategy=Scaffold(), upload="fp16"))
    torch.testing.assert_close(packed.seen, exact.seen, rtol=0, atol=2e-3)
    assert done.rounds[0].bytes_up == CLIENTS * exact.seen[0].numel() * (2 + 4)


def test_every_codec_serves_or_is_refused() -> None:
    for method in codec_names():
        if method in ("majority", "powersgd"):
            with pytest.raises(ConfigurationError, match="ranks that exchange messages"):
                config(upload=method)
            continue
        task = SmallTask()
        simulate(task, num_clients=CLIENTS, config=config(upload=method))
        assert task.seen[-1].isfinite().all()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="download 'topk' leaves out parts of the model"):
        config(download="topk:0.1")
    with pytest.raises(ConfigurationError, match="error_feedback has no effect without a codec"):
        config(error_feedback=True)
    with pytest.raises(ConfigurationError, match="upload is a codec of single updates, which secure aggregation hides"):
        config(upload="int8", secure_aggregation=SecureAggregation(), min_clients=3)
    with pytest.raises(ConfigurationError, match="'int7' is unknown"):
        config(upload="int7")

    class DoubleTask(SmallTask):
        def model(self) -> nn.Module:
            return super().model().double()

    with pytest.raises(ConfigurationError, match="codecs are for models of float32"):
        simulate(DoubleTask(), num_clients=2, config=config(upload="int8"))

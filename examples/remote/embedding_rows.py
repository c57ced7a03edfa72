"""An embedding that is larger than what a worker wants to hold: it pulls and pushes the rows of its batch.

    python examples/remote/embedding_rows.py

Two servers hold the table, here in the worker's own process; elsewhere each is a `torsh ps serve`.
"""

from __future__ import annotations

import torch
from torch import nn

from torsh_distributed.comm.store import open_store
from torsh_distributed.rpc import RpcWorker
from torsh_distributed.rpc.parameters import Consistency, ParameterClient, ParameterServer, RowTable

NUM_WORDS, DIM = 200_000, 16


def main() -> None:
    """Learn which words are good: the label is the parity of the first word."""
    with (
        open_store("memory://") as store,
        ParameterServer("ps0", store=store),
        ParameterServer("ps1", store=store),
        RpcWorker("worker", store) as worker,
        ParameterClient(["ps0", "ps1"], worker=worker, push_codec="bf16") as client,
    ):
        torch.manual_seed(0)
        head = nn.Linear(DIM, 1)
        tables = {"words": RowTable(num_rows=NUM_WORDS, dim=DIM, std=0.1)}
        client.create(
            {**tables, **dict(head.named_parameters())},
            optimizer="Adagrad",
            lr=0.1,
            consistency=Consistency(kind="async"),
        )
        losses = []
        for _ in range(60):
            words = torch.randint(0, 1000, (256,)) * (NUM_WORDS // 1000) + torch.randint(0, 2, (256,))
            labels = (words % 2).float()
            client.pull_into(head)
            rows, places = words.unique(return_inverse=True)
            embedded = client.pull_rows("words", rows).requires_grad_()
            head.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(head(embedded[places])[:, 0], labels)
            loss.backward()
            losses.append(loss.item())
            assert embedded.grad is not None
            gradients = {name: param.grad for name, param in head.named_parameters() if param.grad is not None}
            client.push(gradients, {"words": (rows, embedded.grad)})
        print(f"{NUM_WORDS} rows on 2 servers, loss {losses[0]:.2f} -> {losses[-1]:.2f}")


if __name__ == "__main__":
    main()

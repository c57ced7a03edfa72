"""Training on devices whose data stay where they are.

`federated_task` is what a user writes, `federated_config` how it is run; `simulation` runs it with virtual clients,
`deployment` with devices. A round goes from `rounds` through `local_training` on each client to `strategies`;
`client_selection` says who takes part, `partitioning` divides data for simulations. `robust` and `privacy` change how
updates become one.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)

"""Faults on purpose: a `fault` is a value with a text form, `inflicting` does it, the `injector` finds its moment.
`startup` brings faults from the environment into workers, `fault_log` says what a run made of them."""

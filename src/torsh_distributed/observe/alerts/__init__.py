"""Rules over the metrics of a job, and what is done when one fires.

`alert_rules` says what a rule is, reads TOML and writes rules of Prometheus, `alert_manager` evaluates them,
`alert_actions` tells people, `alert_queue` does so from a thread of its own.
"""

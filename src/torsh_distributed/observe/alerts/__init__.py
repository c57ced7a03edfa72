"""Rules over the metrics of a job, and what is done when one fires.

`alert_rules` says what a rule is and reads TOML, `alert_manager` evaluates rules, `alert_actions` tells people,
`alert_queue` does so from a thread of its own, `prometheus_rules` writes the same rules for Prometheus.
"""

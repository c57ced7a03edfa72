"""Where metrics go: Prometheus, Pushgateway, OTLP, TensorBoard, JSONL and CSV files, W&B, MLflow; Grafana dashboards.

`base` is the interface of an exporter, `registry` reads `kind:target`; all of them run beside the launcher.
"""

"""What one rank measures: the catalogue of metrics, the values, and the collector that fills them from events.

Read `catalogue` first, then `rank_metrics`, `rank_collector` and `rank_reporter`.
"""

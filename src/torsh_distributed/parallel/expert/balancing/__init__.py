"""Which rank holds which expert: `placement`, live rebalancing, and lending of hot experts."""

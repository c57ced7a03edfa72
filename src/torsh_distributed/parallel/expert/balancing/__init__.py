"""Which rank holds which expert: `placement`, then `balance` (moves experts) and `lending` (copies hot ones)."""

"""Every sample of an epoch once: `sample_ledger` says what is done and whose the rest is, `batch_feed` gives a rank's
shares, `data_position` says which data can keep that promise and makes random transforms repeatable, `audit` proves
it."""

"""Finding what is unusual: `detectors` judge one series each, `anomaly_watch` feeds them from the job."""

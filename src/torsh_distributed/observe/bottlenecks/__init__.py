"""Why a run is slow: `step_times` adds up and compares ranks, `bottleneck` judges, `recommendation` advises."""

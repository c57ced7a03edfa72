"""Why a run is slow: `step_times` adds up, `arrivals` compares ranks, `bottleneck` judges, `recommendation` advises."""

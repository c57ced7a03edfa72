"""What a run cost: `run_report` has the numbers and their formulae, `report_page` shows them as one HTML file."""

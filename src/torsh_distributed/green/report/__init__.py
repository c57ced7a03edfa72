"""What a run cost: `run_report` has the numbers and their formulae, `report_page` shows them as one
HTML file, `report_file` keeps either up to date while the job runs."""

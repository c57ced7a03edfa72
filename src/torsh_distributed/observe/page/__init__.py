"""The page for people: `page_routes` serves it live, `html_report` writes it into one file. The rest is in `assets`."""

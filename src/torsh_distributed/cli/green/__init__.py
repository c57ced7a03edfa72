"""`torsh green`: what runs cost in energy and CO2, and when to run."""

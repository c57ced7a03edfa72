"""What communication did and costs: `flight_recorder`, `communication_stats`, `collective_timing`, `network`."""

"""What a worker records about itself as it runs: events (`event_recording`), memory, and its last step (`progress`)."""

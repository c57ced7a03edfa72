"""Keys and certificates (`device_identity`), a server's list (`enrolment`), a device's (`known_peers`)."""

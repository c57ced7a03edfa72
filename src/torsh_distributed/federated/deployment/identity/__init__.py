"""Who is who: keys and certificates (`device_identity`), the server's list (`enrolment`), a device's (`known_peers`)."""

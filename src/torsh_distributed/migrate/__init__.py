"""Other frameworks' configs as plans."""

"""The codecs, one file each, and the table that finds them by the name a plan uses."""

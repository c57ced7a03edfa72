"""`torsh demo`: a ready training job on local workers."""

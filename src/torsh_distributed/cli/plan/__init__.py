"""`torsh plan`: show, check, document and draw plans."""

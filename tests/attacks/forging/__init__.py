"""Forged files of every format that is read: `mutations` makes them bad, `hunt` reads thousands of them."""
